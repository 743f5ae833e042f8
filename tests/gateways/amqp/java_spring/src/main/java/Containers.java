import jakarta.jms.*;
import jakarta.jms.Queue;
import java.lang.IllegalStateException;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.*;
import javax.naming.*;
import org.apache.qpid.jms.JmsConnectionFactory;
import org.messaginghub.pooled.jms.JmsPoolConnectionFactory;
import org.springframework.jms.connection.CachingConnectionFactory;
import org.springframework.jms.connection.JmsTransactionManager;
import org.springframework.jms.core.JmsTemplate;
import org.springframework.jms.listener.DefaultMessageListenerContainer;
import org.springframework.transaction.support.TransactionTemplate;

/** What applications use around a JMS client: Spring's listener container and template, a pool, JNDI. */
public class Containers {
    static String url;

    public static void main(String[] arguments) throws Exception {
        url = arguments[0];
        check("jndi", Containers::jndi);
        check("pool", Containers::pool);
        check("pool_outlives_a_broken_connection", Containers::poolAfterFailure);
        check("spring_template", Containers::template);
        check("spring_listener_container_scales_and_receives_all", Containers::container);
        check("spring_listener_container_rolls_back_and_receives_again", Containers::redelivery);
        check("spring_durable_shared_subscription", Containers::subscription);
        check("spring_local_transaction_manager", Containers::transactionManager);
        System.exit(0);
    }

    interface Check { void run() throws Exception; }

    static void check(String name, Check check) {
        try {
            check.run();
            System.out.println("ok " + name);
        } catch (Throwable failure) {
            System.out.println("FAIL " + name + ": " + failure);
            failure.printStackTrace(System.out);
            System.exit(1);
        }
    }

    static void equal(Object expected, Object found) {
        if (!Objects.equals(expected, found)) throw new AssertionError("expected " + expected + ", found " + found);
    }

    static JmsConnectionFactory factory() {
        return new JmsConnectionFactory("ann", "correct horse", url);
    }

    static JmsPoolConnectionFactory pooled(int connections) {
        JmsPoolConnectionFactory pool = new JmsPoolConnectionFactory();
        pool.setConnectionFactory(factory());
        pool.setMaxConnections(connections);
        return pool;
    }

    static void jndi() throws Exception {
        Hashtable<String, String> environment = new Hashtable<>();
        environment.put(Context.INITIAL_CONTEXT_FACTORY, "org.apache.qpid.jms.jndi.JmsInitialContextFactory");
        environment.put("connectionfactory.gateway", url + "?jms.username=ann&jms.password=correct%20horse");
        environment.put("queue.orders", "k.jndi");
        Context naming = new InitialContext(environment);
        ConnectionFactory factory = (ConnectionFactory) naming.lookup("gateway");
        Queue orders = (Queue) naming.lookup("orders");
        try (JMSContext context = factory.createContext()) {
            context.createProducer().send(orders, "chairs");
            equal("chairs", context.createConsumer(orders).receiveBody(String.class, 30000));
        }
    }

    static void pool() throws Exception {
        JmsPoolConnectionFactory pool = pooled(2);
        try {
            for (int number = 0; number < 20; number++)
                try (Connection connection = pool.createConnection()) {
                    Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
                    session.createProducer(session.createQueue("k.pool")).send(session.createTextMessage("" + number));
                }
            equal(2, pool.getNumConnections());
            try (Connection connection = pool.createConnection()) {
                connection.start();
                Session session = connection.createSession(true, Session.SESSION_TRANSACTED);
                MessageConsumer consumer = session.createConsumer(session.createQueue("k.pool"));
                for (int number = 0; number < 20; number++)
                    equal("" + number, consumer.receive(30000).getBody(String.class));
                session.commit();
            }
        } finally {
            pool.stop();
        }
    }

    static void poolAfterFailure() throws Exception {
        JmsPoolConnectionFactory pool = pooled(1);
        try {
            Connection first = pool.createConnection();
            first.start();
            ((org.messaginghub.pooled.jms.JmsPoolConnection) first).getConnection().close();
            first.close();
            try (Connection second = pool.createConnection()) {
                Session session = second.createSession(false, Session.AUTO_ACKNOWLEDGE);
                session.createProducer(session.createQueue("k.again")).send(session.createTextMessage("x"));
            }
        } finally {
            pool.stop();
        }
    }

    static void template() throws Exception {
        CachingConnectionFactory caching = new CachingConnectionFactory(factory());
        JmsTemplate template = new JmsTemplate(caching);
        template.setReceiveTimeout(30000);
        template.convertAndSend("k.template", Map.of("amount", 4, "name", "chair"), message -> {
            message.setIntProperty("amount", 4);
            return message;
        });
        equal(Map.of("amount", 4, "name", "chair"), template.receiveSelectedAndConvert("k.template", "amount > 3"));
        equal("done", answered(template));
        caching.destroy();
    }

    static String answered(JmsTemplate template) throws Exception {
        ExecutorService service = Executors.newSingleThreadExecutor();
        Future<?> answering = service.submit(() -> {
            Message request = template.receive("k.requests");
            template.send(request.getJMSReplyTo(), session -> session.createTextMessage("done"));
            return null;
        });
        Message answer = template.sendAndReceive("k.requests", session -> session.createTextMessage("do"));
        answering.get(30, TimeUnit.SECONDS);
        service.shutdown();
        return answer.getBody(String.class);
    }

    static DefaultMessageListenerContainer container(String queue, MessageListener listener) {
        DefaultMessageListenerContainer container = new DefaultMessageListenerContainer();
        container.setConnectionFactory(factory());
        container.setDestinationName(queue);
        container.setSessionTransacted(true);
        container.setMessageListener(listener);
        return container;
    }

    static void start(DefaultMessageListenerContainer container) {
        container.afterPropertiesSet();
        container.start();
    }

    static void container() throws Exception {
        Set<String> received = ConcurrentHashMap.newKeySet();
        AtomicInteger count = new AtomicInteger();
        DefaultMessageListenerContainer container = container("k.container", message -> {
            try {
                received.add(message.getBody(String.class));
                count.incrementAndGet();
            } catch (JMSException error) {
                throw new RuntimeException(error);
            }
        });
        container.setConcurrency("2-5");
        start(container);
        JmsPoolConnectionFactory pool = pooled(2);
        JmsTemplate template = new JmsTemplate(pool);
        for (int number = 0; number < 200; number++) template.convertAndSend("k.container", "" + number);
        await(() -> received.size() == 200);
        container.shutdown();
        pool.stop();
        equal(200, count.get());
    }

    static void redelivery() throws Exception {
        List<Boolean> redelivered = new CopyOnWriteArrayList<>();
        DefaultMessageListenerContainer container = container("k.redelivery", message -> {
            try {
                redelivered.add(message.getJMSRedelivered());
                if (redelivered.size() < 3) throw new IllegalStateException("not yet");
            } catch (JMSException error) {
                throw new RuntimeException(error);
            }
        });
        start(container);
        try (JMSContext context = factory().createContext()) {
            context.createProducer().send(context.createQueue("k.redelivery"), "x");
        }
        await(() -> redelivered.size() == 3);
        container.shutdown();
        equal(List.of(false, true, true), redelivered);
    }

    static void subscription() throws Exception {
        AtomicInteger count = new AtomicInteger();
        DefaultMessageListenerContainer container = container("k/news", message -> count.incrementAndGet());
        container.setPubSubDomain(true);
        container.setSubscriptionDurable(true);
        container.setSubscriptionShared(true);
        container.setSubscriptionName("k.news");
        container.setConcurrentConsumers(3);
        start(container);
        await(() -> container.getActiveConsumerCount() == 3 && container.isRegisteredWithDestination());
        JmsTemplate template = new JmsTemplate(new CachingConnectionFactory(factory()));
        template.setPubSubDomain(true);
        for (int number = 0; number < 30; number++) template.convertAndSend("k/news", "" + number);
        await(() -> count.get() == 30);
        container.shutdown();
        ((CachingConnectionFactory) template.getConnectionFactory()).destroy();
    }

    static void transactionManager() throws Exception {
        CachingConnectionFactory caching = new CachingConnectionFactory(factory());
        JmsTemplate template = new JmsTemplate(caching);
        template.setReceiveTimeout(1000);
        TransactionTemplate transaction = new TransactionTemplate(new JmsTransactionManager(caching));
        try {
            transaction.executeWithoutResult(status -> {
                template.convertAndSend("k.manager", "never");
                throw new IllegalStateException("roll back");
            });
            throw new AssertionError("the exception was lost");
        } catch (IllegalStateException expected) {
            equal("roll back", expected.getMessage());
        }
        transaction.executeWithoutResult(status -> template.convertAndSend("k.manager", "kept"));
        template.setReceiveTimeout(30000);
        equal("kept", template.receiveAndConvert("k.manager"));
        caching.destroy();
    }

    static void await(Callable<Boolean> condition) throws Exception {
        long end = System.nanoTime() + 60_000_000_000L;
        while (!condition.call()) {
            if (System.nanoTime() > end) throw new AssertionError("waited a minute");
            Thread.sleep(20);
        }
    }
}

import jakarta.jms.*;
import jakarta.jms.Queue;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.qpid.jms.JmsConnectionFactory;

/** More clauses of chapters 2 to 8, run by Conformance. */
final class Clauses {
    static void all() {
        Conformance.check("2_8_a_transacted_context_commits_and_rolls_back", Clauses::transactedContext);
        Conformance.check("2_8_contexts_share_a_connection", Clauses::sharedContext);
        Conformance.check("3_4_12_delivery_time_is_told", Clauses::deliveryTime);
        Conformance.check("3_5_11_delivery_count_grows", Clauses::deliveryCount);
        Conformance.check("3_8_selector_on_a_topic", Clauses::topicSelector);
        Conformance.check("3_8_an_invalid_selector_is_refused_as_such", Clauses::invalidSelector);
        Conformance.check("3_8_a_boolean_property_is_a_selector", Clauses::booleanSelector);
        Conformance.check("4_2_every_subscriber_gets_a_copy", Clauses::copies);
        Conformance.check("4_2_wildcards", Clauses::wildcards);
        Conformance.check("6_1_4_a_stopped_connection_delivers_nothing", Clauses::stopped);
        Conformance.check("6_2_2_temporary_topic", Clauses::temporaryTopic);
        Conformance.check("6_2_2_a_deleted_temporary_queue_is_gone", Clauses::deletedTemporary);
        Conformance.check("6_2_7_rollback_brings_back_what_a_topic_said", Clauses::topicRollback);
        Conformance.check("6_2_7_a_closed_session_rolls_back", Clauses::closedRollback);
        Conformance.check("6_2_9_order_within_a_session", Clauses::order);
        Conformance.check("6_2_10_dups_ok", Clauses::dupsOk);
        Conformance.check("6_2_10_acknowledging_one_acknowledges_those_before", Clauses::acknowledgesBefore);
        Conformance.check("7_3_close_waits_for_completions", Clauses::closeWaits);
        Conformance.check("7_3_a_refused_async_send_says_why", Clauses::refusedAsync);
        Conformance.check("7_9_a_delayed_message_is_not_browsed_before_its_time", Clauses::delayedUnseen);
        Conformance.check("8_3_2_a_shared_subscription_ends_with_its_last_consumer", Clauses::sharedEnds);
        Conformance.check("8_3_2_another_topic_or_selector_is_refused_while_in_use", Clauses::sharedNonDurableChanged);
        Conformance.check("8_3_3_a_durable_subscription_in_use_cannot_end", Clauses::inUse);
        Conformance.check("8_3_4_another_selector_is_refused_while_in_use", Clauses::sharedChanged);
        Conformance.check("8_7_message_listener", Clauses::listener);
        Conformance.check("fault_a_large_message_passes_whole", Clauses::large);
    }

    static JmsConnectionFactory factory() {
        return new JmsConnectionFactory("ann", "correct horse", Conformance.url);
    }

    static void transactedContext() throws Exception {
        try (JMSContext context = factory().createContext(JMSContext.SESSION_TRANSACTED)) {
            Queue queue = context.createQueue("c.context");
            context.createProducer().send(queue, "never");
            context.rollback();
            context.createProducer().send(queue, "kept");
            context.commit();
            JMSConsumer consumer = context.createConsumer(queue);
            Conformance.equal("kept", consumer.receiveBody(String.class, 5000));
            context.rollback();
            Message again = consumer.receive(30000);
            Conformance.equal("kept", again.getBody(String.class));
            Conformance.equal(true, again.getJMSRedelivered());
            context.commit();
        }
    }

    static void sharedContext() throws Exception {
        try (JMSContext context = factory().createContext(); JMSContext other = context.createContext(JMSContext.CLIENT_ACKNOWLEDGE)) {
            Queue queue = context.createQueue("c.contexts");
            Map<String, Object> map = Map.of("chairs", 4);
            context.createProducer().setDeliveryMode(DeliveryMode.PERSISTENT).setJMSCorrelationID("c").send(queue, map);
            Message got = other.createConsumer(queue).receive(30000);
            Conformance.equal(4, ((MapMessage) got).getInt("chairs"));
            Conformance.equal("c", got.getJMSCorrelationID());
            other.acknowledge();
        }
    }

    static void deliveryTime() throws Exception {
        try (JMSContext context = factory().createContext()) {
            Queue queue = context.createQueue("c.time");
            TextMessage sent = context.createTextMessage("late");
            context.createProducer().setDeliveryDelay(50).send(queue, sent);
            Message got = context.createConsumer(queue).receive(30000);
            Conformance.equal(sent.getJMSDeliveryTime(), got.getJMSDeliveryTime());
            Conformance.equal(true, got.getJMSDeliveryTime() >= got.getJMSTimestamp() + 50);
        }
    }

    static void deliveryCount() throws Exception {
        try (Connection connection = Conformance.connect(null)) {
            Session session = connection.createSession(true, Session.SESSION_TRANSACTED);
            Queue queue = session.createQueue("c.count");
            session.createProducer(queue).send(session.createTextMessage("x"));
            session.commit();
            MessageConsumer consumer = session.createConsumer(queue);
            for (int count = 1; count <= 3; count++) {
                Conformance.equal(count, consumer.receive(30000).getIntProperty("JMSXDeliveryCount"));
                if (count < 3) session.rollback();
            }
            session.commit();
        }
    }

    static void topicSelector() throws Exception {
        try (Connection connection = Conformance.connect(null)) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Topic topic = session.createTopic("c/selected");
            MessageConsumer consumer = session.createConsumer(topic, "colour = 'red' AND size > 2");
            MessageProducer producer = session.createProducer(topic);
            producer.setDeliveryMode(DeliveryMode.NON_PERSISTENT);
            for (int size = 1; size <= 4; size++) {
                for (String colour : List.of("red", "blue")) {
                    TextMessage made = session.createTextMessage(colour + size);
                    made.setStringProperty("colour", colour);
                    made.setIntProperty("size", size);
                    producer.send(made);
                }
            }
            Conformance.equal("red3", Conformance.text(consumer.receive(30000)));
            Conformance.equal("red4", Conformance.text(consumer.receive(30000)));
            Conformance.equal(null, consumer.receiveNoWait());
        }
    }

    static void invalidSelector() throws Exception {
        try (Connection connection = Conformance.connect("c.invalid")) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Queue queue = session.createQueue("c.invalid");
            Topic topic = session.createTopic("c/invalid");
            for (String selector : List.of("n = = 1", "n BETWEEN 1", "n LIKE 5", "n IN ()", "'x", "n = 1 AND", "1 +", "NOT")) {
                List<Callable<?>> uses = List.of(
                        () -> session.createConsumer(queue, selector),
                        () -> session.createConsumer(topic, selector),
                        () -> session.createBrowser(queue, selector).getEnumeration(),
                        () -> session.createDurableConsumer(topic, "sub", selector, false),
                        () -> session.createSharedConsumer(topic, "shared", selector));
                for (Callable<?> use : uses) {
                    try {
                        use.call();
                        throw new AssertionError(selector + " is accepted");
                    } catch (InvalidSelectorException expected) {
                        // as it should be
                    }
                }
            }
        }
    }

    static void booleanSelector() throws Exception {
        try (JMSContext context = factory().createContext()) {
            Queue queue = context.createQueue("c.paid");
            for (boolean paid : List.of(false, true)) context.createProducer().setProperty("paid", paid).send(queue, "" + paid);
            Conformance.equal("true", context.createConsumer(queue, "paid").receiveBody(String.class, 30000));
            Conformance.equal("false", context.createConsumer(queue, "NOT paid").receiveBody(String.class, 30000));
        }
    }

    static void copies() throws Exception {
        try (Connection one = Conformance.connect(null); Connection two = Conformance.connect(null)) {
            Session first = one.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Session second = two.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Topic topic = first.createTopic("c/copies");
            List<MessageConsumer> all = List.of(first.createConsumer(topic), first.createConsumer(topic), second.createConsumer(topic));
            first.createProducer(topic).send(first.createTextMessage("to all"));
            for (MessageConsumer each : all) Conformance.equal("to all", Conformance.text(each.receive(30000)));
        }
    }

    static void wildcards() throws Exception {
        try (Connection connection = Conformance.connect(null)) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            MessageConsumer consumer = session.createConsumer(session.createTopic("path:c/wild/*"));
            session.createProducer(session.createTopic("c/other/1")).send(session.createTextMessage("no"));
            session.createProducer(session.createTopic("c/wild/1")).send(session.createTextMessage("yes"));
            Message got = consumer.receive(30000);
            Conformance.equal("yes", Conformance.text(got));
            Conformance.equal("c/wild/1", ((Topic) got.getJMSDestination()).getTopicName());
        }
    }

    static void stopped() throws Exception {
        try (Connection connection = Conformance.connect(null)) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Queue queue = session.createQueue("c.stopped");
            MessageConsumer consumer = session.createConsumer(queue);
            connection.stop();
            session.createProducer(queue).send(session.createTextMessage("later"));
            Conformance.equal(null, consumer.receive(100));
            connection.start();
            Conformance.equal("later", Conformance.text(consumer.receive(30000)));
        }
    }

    static void temporaryTopic() throws Exception {
        try (Connection one = Conformance.connect(null); Connection two = Conformance.connect(null)) {
            Session first = one.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Session second = two.createSession(false, Session.AUTO_ACKNOWLEDGE);
            TemporaryTopic topic = first.createTemporaryTopic();
            MessageConsumer consumer = first.createConsumer(topic);
            second.createProducer(topic).send(second.createTextMessage("hello"));
            Conformance.equal("hello", Conformance.text(consumer.receive(30000)));
            consumer.close();
            topic.delete();
        }
    }

    static void deletedTemporary() throws Exception {
        try (Connection connection = Conformance.connect(null)) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            TemporaryQueue queue = session.createTemporaryQueue();
            session.createProducer(queue).send(session.createTextMessage("lost with it"));
            queue.delete();
            try {
                session.createConsumer(queue);
                throw new AssertionError("it was deleted");
            } catch (JMSException expected) {
                // as it should be
            }
        }
    }

    static void topicRollback() throws Exception {
        try (Connection connection = Conformance.connect(null)) {
            Session session = connection.createSession(true, Session.SESSION_TRANSACTED);
            Session outside = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Topic topic = session.createTopic("c/rollback");
            MessageConsumer consumer = session.createConsumer(topic);
            MessageProducer producer = outside.createProducer(topic);
            producer.setDeliveryMode(DeliveryMode.NON_PERSISTENT);
            for (int number = 0; number < 5; number++) producer.send(outside.createTextMessage("" + number));
            Conformance.equal("0", Conformance.text(consumer.receive(30000)));
            Conformance.equal("1", Conformance.text(consumer.receive(30000)));
            session.rollback();
            for (int number = 0; number < 5; number++) {
                Message again = consumer.receive(30000);
                Conformance.equal("" + number, Conformance.text(again));
                Conformance.equal(number < 2, again.getJMSRedelivered());
            }
            session.commit();
            Conformance.equal(null, consumer.receiveNoWait());
        }
    }

    static void closedRollback() throws Exception {
        try (Connection connection = Conformance.connect(null)) {
            Session session = connection.createSession(true, Session.SESSION_TRANSACTED);
            Queue queue = session.createQueue("c.closed");
            session.createProducer(queue).send(session.createTextMessage("kept"));
            session.commit();
            Conformance.equal("kept", Conformance.text(session.createConsumer(queue).receive(30000)));
            session.createProducer(queue).send(session.createTextMessage("never"));
            session.close();
            Session next = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            MessageConsumer consumer = next.createConsumer(queue);
            Conformance.equal("kept", Conformance.text(consumer.receive(30000)));
            Conformance.equal(null, consumer.receiveNoWait());
        }
    }

    static void order() throws Exception {
        try (Connection connection = Conformance.connect(null)) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            for (Destination destination : List.of(session.createQueue("c.order"), session.createTopic("c/order"))) {
                MessageConsumer consumer = session.createConsumer(destination);
                MessageProducer producer = session.createProducer(destination);
                producer.setDeliveryMode(DeliveryMode.NON_PERSISTENT);
                for (int number = 0; number < 300; number++) producer.send(session.createTextMessage("" + number));
                for (int number = 0; number < 300; number++) Conformance.equal("" + number, Conformance.text(consumer.receive(30000)));
                consumer.close();
            }
        }
    }

    static void dupsOk() throws Exception {
        try (Connection connection = Conformance.connect(null)) {
            Session session = connection.createSession(false, Session.DUPS_OK_ACKNOWLEDGE);
            Queue queue = session.createQueue("c.lazy");
            MessageProducer producer = session.createProducer(queue);
            for (int number = 0; number < 20; number++) producer.send(session.createTextMessage("" + number));
            MessageConsumer consumer = session.createConsumer(queue);
            for (int number = 0; number < 20; number++) Conformance.equal("" + number, Conformance.text(consumer.receive(30000)));
            session.close();
            Session next = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Conformance.equal(null, next.createConsumer(queue).receive(200));
        }
    }

    static void acknowledgesBefore() throws Exception {
        try (Connection connection = Conformance.connect(null)) {
            Session session = connection.createSession(false, Session.CLIENT_ACKNOWLEDGE);
            Queue queue = session.createQueue("c.before");
            MessageProducer producer = session.createProducer(queue);
            for (int number = 0; number < 3; number++) producer.send(session.createTextMessage("" + number));
            MessageConsumer consumer = session.createConsumer(queue);
            consumer.receive(30000);
            consumer.receive(30000).acknowledge();
            session.close();
            Session next = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            MessageConsumer rest = next.createConsumer(queue);
            Conformance.equal("2", Conformance.text(rest.receive(30000)));
            Conformance.equal(null, rest.receiveNoWait());
        }
    }

    static void closeWaits() throws Exception {
        Outcomes done = new Outcomes();
        try (Connection connection = Conformance.connect(null)) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            MessageProducer producer = session.createProducer(session.createQueue("c.waits"));
            for (int number = 0; number < 50; number++) producer.send(session.createTextMessage("" + number), done);
            producer.close();
            Conformance.equal(50, done.completions(50));
        }
        Conformance.equal(null, done.error);
    }

    static final class Outcomes implements CompletionListener {
        final AtomicInteger completed = new AtomicInteger();
        final CountDownLatch failed = new CountDownLatch(1);
        volatile Exception error;

        public void onCompletion(Message message) { completed.incrementAndGet(); }
        public void onException(Message message, Exception found) {
            error = found;
            failed.countDown();
        }

        /** The client calls its listeners in a thread of its own, which may be late: also behind a close, though
         *  that has waited until everything was settled. */
        int completions(int wanted) throws InterruptedException {
            for (int tries = 0; completed.get() < wanted && tries < 2000; tries++) Thread.sleep(10);
            return completed.get();
        }

        Class<?> failure() throws InterruptedException {
            return failed.await(20, TimeUnit.SECONDS) ? error.getClass() : null;
        }
    }

    static void refusedAsync() throws Exception {
        try (Connection connection = Conformance.connect(null)) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Outcomes done = new Outcomes();
            MessageProducer producer = session.createProducer(session.createQueue("c.refused"));
            BytesMessage large = session.createBytesMessage();
            large.writeBytes(new byte[9 << 20]);
            producer.send(large, done);
            producer.close();
            Conformance.equal(JMSException.class, done.failure());
            Outcomes forbidden = new Outcomes();
            MessageProducer anywhere = session.createProducer(null);
            anywhere.send(session.createTopic("secret/plans"), session.createTextMessage("x"), forbidden);
            anywhere.close();
            Conformance.equal(JMSSecurityException.class, forbidden.failure());
        }
    }

    static void delayedUnseen() throws Exception {
        try (Connection connection = Conformance.connect(null)) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Queue queue = session.createQueue("c.unseen");
            MessageProducer producer = session.createProducer(queue);
            producer.setDeliveryDelay(1500);
            producer.send(session.createTextMessage("late"));
            Conformance.equal(false, session.createBrowser(queue).getEnumeration().hasMoreElements());
            Conformance.equal("late", Conformance.text(session.createConsumer(queue).receive(30000)));
        }
    }

    static void sharedEnds() throws Exception {
        try (Connection connection = Conformance.connect(null)) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Topic topic = session.createTopic("c/ends");
            session.createSharedConsumer(topic, "group").close();
            session.createProducer(topic).send(session.createTextMessage("nobody hears it"));
            Conformance.equal(null, session.createSharedConsumer(topic, "group").receive(200));
        }
    }

    static void sharedNonDurableChanged() throws Exception {
        for (String clientId : Arrays.asList(null, "c.shares")) {
            try (Connection connection = Conformance.connect(clientId)) {
                Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
                Topic topic = session.createTopic("c/shares");
                MessageConsumer first = session.createSharedConsumer(topic, "c.shares", "n = 1");
                session.createSharedConsumer(topic, "c.shares", "n = 1").close();
                for (String[] other : new String[][] {{"c/shares", "n = 2"}, {"c/shares", null}, {"c/elsewhere", "n = 1"}}) {
                    try {
                        session.createSharedConsumer(session.createTopic(other[0]), "c.shares", other[1]);
                        throw new AssertionError("the name is in use: " + Arrays.toString(other));
                    } catch (JMSException expected) {
                        // as it should be
                    }
                }
                first.close();
                session.createSharedConsumer(topic, "c.shares", "n = 2").close();
            }
        }
    }

    static void inUse() throws Exception {
        try (Connection connection = Conformance.connect("c.in-use")) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            MessageConsumer consumer = session.createDurableConsumer(session.createTopic("c/in-use"), "sub");
            try {
                session.unsubscribe("sub");
                throw new AssertionError("it has a consumer");
            } catch (JMSException expected) {
                // as it should be
            }
            consumer.close();
            session.unsubscribe("sub");
        }
    }

    static void sharedChanged() throws Exception {
        try (Connection connection = Conformance.connect(null)) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Topic topic = session.createTopic("c/changed");
            MessageConsumer consumer = session.createSharedDurableConsumer(topic, "c.changed", "n = 1");
            try {
                session.createSharedDurableConsumer(topic, "c.changed", "n = 2");
                throw new AssertionError("it is in use with another selector");
            } catch (JMSException expected) {
                // as it should be
            }
            consumer.close();
            session.unsubscribe("c.changed");
        }
    }

    static void listener() throws Exception {
        try (Connection connection = Conformance.connect(null)) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Queue queue = session.createQueue("c.listener");
            BlockingQueue<String> heard = new LinkedBlockingQueue<>();
            session.createConsumer(queue).setMessageListener(message -> {
                try { heard.add(Conformance.text(message)); } catch (JMSException error) { heard.add("" + error); }
            });
            Session sending = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            MessageProducer producer = sending.createProducer(queue);
            for (int number = 0; number < 10; number++) producer.send(sending.createTextMessage("" + number));
            for (int number = 0; number < 10; number++) Conformance.equal("" + number, heard.poll(5, TimeUnit.SECONDS));
        }
    }

    static void large() throws Exception {
        try (Connection connection = Conformance.connect(null)) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            byte[] content = new byte[5 << 20];
            new Random(4).nextBytes(content);
            for (Destination destination : List.of(session.createQueue("c.large"), session.createTopic("c/large"))) {
                MessageConsumer consumer = session.createConsumer(destination);
                BytesMessage made = session.createBytesMessage();
                made.writeBytes(content);
                session.createProducer(destination).send(made);
                BytesMessage got = (BytesMessage) consumer.receive(30000);
                byte[] found = new byte[(int) got.getBodyLength()];
                got.readBytes(found);
                Conformance.equal(true, Arrays.equals(content, found));
                consumer.close();
            }
        }
    }
}

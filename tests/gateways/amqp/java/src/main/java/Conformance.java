import jakarta.jms.*;
import jakarta.jms.Queue;
import java.util.*;
import java.util.concurrent.*;
import org.apache.qpid.jms.JmsConnectionFactory;

/** What a JMS client can see on the wire, clause by clause; prints "ok NAME" or "FAIL NAME: why" for each. */
public final class Conformance {
    interface Check { void run() throws Exception; }

    static String url;
    static int failures;

    static Connection connect(String clientId) throws JMSException {
        Connection made = new JmsConnectionFactory("ann", "correct horse", url).createConnection();
        if (clientId != null) made.setClientID(clientId);
        made.start();
        return made;
    }

    static void check(String name, Check body) {
        try {
            body.run();
            System.out.println("ok " + name);
        } catch (Throwable error) {
            failures++;
            System.out.println("FAIL " + name + ": " + error);
        }
    }

    static void equal(Object wanted, Object found) {
        if (!Objects.equals(wanted, found)) throw new AssertionError("wanted " + wanted + ", found " + found);
    }

    static String text(Message message) throws JMSException {
        return message == null ? null : ((TextMessage) message).getText();
    }

    public static void main(String[] arguments) throws Exception {
        url = arguments[0];
        check("3_4_headers_and_3_5_properties_arrive_with_their_types", Conformance::headersAndProperties);
        check("3_8_selector_on_a_queue", Conformance::queueSelector);
        check("3_11_five_message_types", Conformance::types);
        check("4_1_6_browser_takes_nothing", Conformance::browser);
        check("6_1_2_client_id_is_exclusive", Conformance::clientId);
        check("6_1_6_wrong_password_is_a_security_exception", Conformance::security);
        check("6_2_7_commit_and_rollback", Conformance::transactions);
        check("6_2_10_client_acknowledgement_and_recover", Conformance::recover);
        check("6_2_temporary_queue_request_and_reply", Conformance::temporary);
        check("7_7_persistent_and_non_persistent", Conformance::deliveryModes);
        check("7_8_time_to_live", Conformance::timeToLive);
        check("7_9_delivery_delay", Conformance::delay);
        check("7_3_async_send_with_completion_listener", Conformance::completion);
        check("3_4_10_priority", Conformance::priority);
        check("8_3_1_no_local", Conformance::noLocal);
        check("8_3_2_shared_non_durable", Conformance::sharedNonDurable);
        check("8_3_3_unshared_durable_and_unsubscribe", Conformance::durable);
        check("8_3_4_shared_durable", Conformance::sharedDurable);
        check("2_8_jms_context", Conformance::context);
        check("6_2_7_a_failed_commit_rolls_back", Conformance::failedCommit);
        check("3_5_9_message_groups_stay_with_one_consumer", Conformance::groups);
        check("7_3_completion_listeners_are_called_in_order", Conformance::completionOrder);
        check("8_3_3_a_durable_subscription_has_one_consumer", Conformance::oneConsumer);
        check("8_3_3_a_changed_selector_makes_a_new_subscription", Conformance::changedSelector);
        check("fault_oversized_message_closes_its_producer", Conformance::oversized);
        check("fault_no_topic_is_an_invalid_destination_exception", Conformance::noTopic);
        check("fault_forbidden_topic_is_a_security_exception", Conformance::forbidden);
        check("fault_client_without_credit_gets_nothing_and_others_go_on", Conformance::noCredit);
        Clauses.all();
        for (String mechanism : new String[] {"PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "ANONYMOUS"})
            check("sasl_" + mechanism, () -> sasl(url, mechanism));
        if (arguments.length > 1) check("tls", () -> sasl(arguments[1], "PLAIN"));
        System.out.println(failures == 0 ? "all held" : failures + " failed");
        System.exit(failures == 0 ? 0 : 1);
    }

    static void headersAndProperties() throws Exception {
        try (Connection connection = connect(null)) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Queue queue = session.createQueue("j.headers");
            TextMessage sent = session.createTextMessage("hello");
            sent.setJMSCorrelationID("c-1");
            sent.setJMSType("greeting");
            sent.setJMSReplyTo(session.createTopic("answers"));
            sent.setByteProperty("b", (byte) 1);
            sent.setShortProperty("s", (short) 2);
            sent.setIntProperty("i", 3);
            sent.setLongProperty("l", 4L);
            sent.setFloatProperty("f", 1.5f);
            sent.setDoubleProperty("d", 2.5);
            sent.setBooleanProperty("z", true);
            sent.setStringProperty("t", "text");
            session.createProducer(queue).send(sent);
            Message got = session.createConsumer(queue).receive(30000);
            equal("hello", text(got));
            equal(sent.getJMSMessageID(), got.getJMSMessageID());
            equal("c-1", got.getJMSCorrelationID());
            equal("greeting", got.getJMSType());
            equal("answers", ((Topic) got.getJMSReplyTo()).getTopicName());
            equal(queue, got.getJMSDestination());
            equal(DeliveryMode.PERSISTENT, got.getJMSDeliveryMode());
            equal(false, got.getJMSRedelivered());
            equal((byte) 1, got.getObjectProperty("b"));
            equal((short) 2, got.getObjectProperty("s"));
            equal(3, got.getObjectProperty("i"));
            equal(4L, got.getObjectProperty("l"));
            equal(1.5f, got.getObjectProperty("f"));
            equal(2.5, got.getObjectProperty("d"));
            equal(true, got.getObjectProperty("z"));
            equal("text", got.getObjectProperty("t"));
            equal(1, got.getIntProperty("JMSXDeliveryCount"));
        }
    }

    static void queueSelector() throws Exception {
        try (Connection connection = connect(null)) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Queue queue = session.createQueue("j.selector");
            MessageProducer producer = session.createProducer(queue);
            for (int number = 0; number < 6; number++) {
                TextMessage made = session.createTextMessage("" + number);
                made.setIntProperty("n", number);
                producer.send(made);
            }
            MessageConsumer some = session.createConsumer(queue, "n > 3");
            equal("4", text(some.receive(30000)));
            equal("5", text(some.receive(30000)));
            equal(null, some.receiveNoWait());
            some.close();
            equal("0", text(session.createConsumer(queue).receive(30000)));
        }
    }

    static void types() throws Exception {
        try (Connection connection = connect(null)) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Queue queue = session.createQueue("j.types");
            MessageProducer producer = session.createProducer(queue);
            BytesMessage bytes = session.createBytesMessage();
            bytes.writeInt(7);
            producer.send(bytes);
            MapMessage map = session.createMapMessage();
            map.setInt("one", 1);
            map.setBytes("raw", new byte[] {1, 2});
            map.setChar("c", 'x');
            producer.send(map);
            StreamMessage stream = session.createStreamMessage();
            stream.writeLong(9L);
            stream.writeString("nine");
            producer.send(stream);
            producer.send(session.createObjectMessage(new ArrayList<>(List.of("a", "b"))));
            producer.send(session.createMessage());
            MessageConsumer consumer = session.createConsumer(queue);
            equal(7, ((BytesMessage) consumer.receive(30000)).readInt());
            MapMessage gotMap = (MapMessage) consumer.receive(30000);
            equal(1, gotMap.getInt("one"));
            equal(2, gotMap.getBytes("raw").length);
            equal('x', gotMap.getChar("c"));
            StreamMessage gotStream = (StreamMessage) consumer.receive(30000);
            equal(9L, gotStream.readLong());
            equal("nine", gotStream.readString());
            equal(List.of("a", "b"), ((ObjectMessage) consumer.receive(30000)).getObject());
            Message plain = consumer.receive(30000);
            equal(false, plain instanceof TextMessage || plain instanceof BytesMessage);
        }
    }

    static void browser() throws Exception {
        try (Connection connection = connect(null)) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Queue queue = session.createQueue("j.browse");
            MessageProducer producer = session.createProducer(queue);
            for (int number = 0; number < 3; number++) producer.send(session.createTextMessage("" + number));
            List<String> seen = new ArrayList<>();
            for (Enumeration<?> all = session.createBrowser(queue).getEnumeration(); all.hasMoreElements(); )
                seen.add(text((Message) all.nextElement()));
            equal(List.of("0", "1", "2"), seen);
            equal("0", text(session.createConsumer(queue).receive(30000)));
        }
    }

    static void clientId() throws Exception {
        try (Connection first = connect("j.only")) {
            try (Connection second = connect("j.only")) {
                throw new AssertionError("two connections have one client id");
            } catch (InvalidClientIDException expected) {
                // as it should be
            }
        }
        connect("j.only").close();
    }

    static void security() throws Exception {
        try (Connection wrong = new JmsConnectionFactory("ann", "wrong", url).createConnection()) {
            wrong.start();
            throw new AssertionError("a wrong password was taken");
        } catch (JMSSecurityException expected) {
            // as it should be
        }
    }

    static void transactions() throws Exception {
        try (Connection connection = connect(null)) {
            Session session = connection.createSession(true, Session.SESSION_TRANSACTED);
            Session outside = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Queue in = session.createQueue("j.in"), out = session.createQueue("j.out");
            MessageProducer feeding = outside.createProducer(in);
            for (int number = 0; number < 3; number++) feeding.send(outside.createTextMessage("" + number));
            MessageConsumer consumer = session.createConsumer(in);
            MessageProducer producer = session.createProducer(out);
            equal("0", text(consumer.receive(30000)));
            producer.send(session.createTextMessage("never"));
            session.rollback();
            Message again = consumer.receive(30000);
            equal("0", text(again));
            equal(true, again.getJMSRedelivered());
            producer.send(session.createTextMessage("done 0"));
            session.commit();
            equal("1", text(consumer.receive(30000)));
            session.commit();
            MessageConsumer results = outside.createConsumer(out);
            equal("done 0", text(results.receive(30000)));
            equal(null, results.receiveNoWait());
        }
    }

    static void recover() throws Exception {
        try (Connection connection = connect(null)) {
            Session session = connection.createSession(false, Session.CLIENT_ACKNOWLEDGE);
            Queue queue = session.createQueue("j.recover");
            MessageProducer producer = session.createProducer(queue);
            producer.send(session.createTextMessage("a"));
            producer.send(session.createTextMessage("b"));
            MessageConsumer consumer = session.createConsumer(queue);
            equal("a", text(consumer.receive(30000)));
            session.recover();
            Message again = consumer.receive(30000);
            equal("a", text(again));
            equal(true, again.getJMSRedelivered());
            again.acknowledge();
            session.close();
            Session next = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            MessageConsumer rest = next.createConsumer(queue);
            Message last = rest.receive(30000);
            equal("b", text(last));
            equal(false, last.getJMSRedelivered());
        }
    }

    static void temporary() throws Exception {
        try (Connection asking = connect(null); Connection serving = connect(null)) {
            Session session = asking.createSession(false, Session.AUTO_ACKNOWLEDGE);
            TemporaryQueue answers = session.createTemporaryQueue();
            MessageConsumer consumer = session.createConsumer(answers);
            TextMessage question = session.createTextMessage("how many?");
            question.setJMSReplyTo(answers);
            session.createProducer(session.createQueue("j.service")).send(question);
            Session other = serving.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Message asked = other.createConsumer(other.createQueue("j.service")).receive(30000);
            other.createProducer(asked.getJMSReplyTo()).send(other.createTextMessage("four"));
            equal("four", text(consumer.receive(30000)));
            consumer.close();
            answers.delete();
        }
    }

    static void deliveryModes() throws Exception {
        try (Connection connection = connect(null)) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Topic topic = session.createTopic("j/modes");
            MessageConsumer consumer = session.createConsumer(topic);
            MessageProducer producer = session.createProducer(topic);
            producer.setDeliveryMode(DeliveryMode.NON_PERSISTENT);
            producer.send(session.createTextMessage("light"));
            Message light = consumer.receive(30000);
            equal(DeliveryMode.NON_PERSISTENT, light.getJMSDeliveryMode());
            producer.setDeliveryMode(DeliveryMode.PERSISTENT);
            producer.send(session.createTextMessage("heavy"));
            equal(DeliveryMode.PERSISTENT, consumer.receive(30000).getJMSDeliveryMode());
        }
    }

    static void timeToLive() throws Exception {
        try (Connection connection = connect(null)) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Queue queue = session.createQueue("j.ttl");
            MessageProducer producer = session.createProducer(queue);
            producer.setTimeToLive(20);
            producer.send(session.createTextMessage("short"));
            producer.setTimeToLive(0);
            producer.send(session.createTextMessage("long"));
            Thread.sleep(50);
            equal("long", text(session.createConsumer(queue).receive(30000)));
        }
    }

    static void delay() throws Exception {
        try (Connection connection = connect(null)) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Queue queue = session.createQueue("j.delay");
            MessageConsumer consumer = session.createConsumer(queue);
            MessageProducer producer = session.createProducer(queue);
            producer.setDeliveryDelay(400);
            long before = System.currentTimeMillis();
            producer.send(session.createTextMessage("late"));
            equal("late", text(consumer.receive(30000)));
            equal(true, System.currentTimeMillis() - before >= 400);
        }
    }

    static void completion() throws Exception {
        try (Connection connection = connect(null)) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            MessageProducer producer = session.createProducer(session.createQueue("j.async"));
            CountDownLatch done = new CountDownLatch(5);
            for (int number = 0; number < 5; number++)
                producer.send(session.createTextMessage("" + number), new CompletionListener() {
                    public void onCompletion(Message message) { done.countDown(); }
                    public void onException(Message message, Exception error) { }
                });
            equal(true, done.await(5, TimeUnit.SECONDS));
        }
    }

    static void priority() throws Exception {
        try (Connection connection = connect(null)) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Queue queue = session.createQueue("j.priority");
            MessageProducer producer = session.createProducer(queue);
            for (int priority : new int[] {1, 9, 5}) {
                producer.setPriority(priority);
                producer.send(session.createTextMessage("" + priority));
            }
            MessageConsumer consumer = session.createConsumer(queue);
            equal("9", text(consumer.receive(30000)));
            equal("5", text(consumer.receive(30000)));
            equal("1", text(consumer.receive(30000)));
        }
    }

    static void noLocal() throws Exception {
        try (Connection mine = connect("j.mine"); Connection other = connect(null)) {
            Session session = mine.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Topic topic = session.createTopic("j/local");
            MessageConsumer consumer = session.createConsumer(topic, null, true);
            session.createProducer(topic).send(session.createTextMessage("mine"));
            Session others = other.createSession(false, Session.AUTO_ACKNOWLEDGE);
            others.createProducer(topic).send(others.createTextMessage("theirs"));
            equal("theirs", text(consumer.receive(30000)));
        }
    }

    static void sharedNonDurable() throws Exception {
        try (Connection one = connect(null); Connection two = connect(null)) {
            Session first = one.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Session second = two.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Topic topic = first.createTopic("j/shared");
            MessageConsumer a = first.createSharedConsumer(topic, "share");
            MessageConsumer b = second.createSharedConsumer(topic, "share");
            MessageProducer producer = first.createProducer(topic);
            for (int number = 0; number < 10; number++) producer.send(first.createTextMessage("" + number));
            int found = 0;
            for (Message got; found < 10 && (((got = a.receive(200)) != null) || (got = b.receive(200)) != null); ) found++;
            equal(10, found);
            equal(null, a.receive(100));
            equal(null, b.receive(100));
        }
    }

    static void durable() throws Exception {
        Topic topic;
        try (Connection connection = connect("j.durable")) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            topic = session.createTopic("j/durable");
            session.createDurableConsumer(topic, "sub").close();
            session.createProducer(topic).send(session.createTextMessage("while away"));
        }
        try (Connection connection = connect("j.durable")) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            MessageConsumer consumer = session.createDurableConsumer(topic, "sub");
            equal("while away", text(consumer.receive(30000)));
            consumer.close();
            session.unsubscribe("sub");
            try {
                session.unsubscribe("sub");
                throw new AssertionError("it was there twice");
            } catch (InvalidDestinationException expected) {
                // as it should be
            }
        }
    }

    static void sharedDurable() throws Exception {
        try (Connection one = connect(null); Connection two = connect(null)) {
            Session first = one.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Session second = two.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Topic topic = first.createTopic("j/shared-durable");
            first.createSharedDurableConsumer(topic, "both").close();
            MessageProducer producer = first.createProducer(topic);
            for (int number = 0; number < 4; number++) producer.send(first.createTextMessage("" + number));
            MessageConsumer a = first.createSharedDurableConsumer(topic, "both");
            MessageConsumer b = second.createSharedDurableConsumer(topic, "both");
            int found = 0;
            for (Message got; found < 4 && (((got = a.receive(500)) != null) || (got = b.receive(500)) != null); ) found++;
            equal(4, found);
            a.close();
            b.close();
            first.unsubscribe("both");
        }
    }

    static void context() throws Exception {
        try (JMSContext context = new JmsConnectionFactory("ann", "correct horse", url).createContext()) {
            Queue queue = context.createQueue("j.context");
            context.createProducer().setProperty("n", 1).send(queue, "simple");
            equal("simple", context.createConsumer(queue).receiveBody(String.class, 5000));
        }
    }

    static void failedCommit() throws Exception {
        try (Connection connection = connect(null)) {
            Session session = connection.createSession(true, Session.SESSION_TRANSACTED);
            Queue queue = session.createQueue("j.failed");
            MessageProducer producer = session.createProducer(queue);
            producer.send(session.createTextMessage("with the others"));
            Topic forbidden = session.createTopic("secret/plans");
            try {
                session.createProducer(null).send(forbidden, session.createTextMessage("never"));
                session.commit();
                throw new AssertionError("a commit that sends what is forbidden succeeded");
            } catch (TransactionRolledBackException | JMSSecurityException expected) {
                // as it should be
            }
            Session outside = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            equal(null, outside.createConsumer(queue).receive(300));
        }
    }

    static void groups() throws Exception {
        try (Connection one = connect(null); Connection two = connect(null)) {
            Session first = one.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Session second = two.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Queue queue = first.createQueue("j.groups");
            MessageConsumer a = first.createConsumer(queue), b = second.createConsumer(queue);
            MessageProducer producer = first.createProducer(queue);
            for (int number = 0; number < 12; number++) {
                TextMessage made = first.createTextMessage("" + number);
                made.setStringProperty("JMSXGroupID", "g" + number % 3);
                producer.send(made);
            }
            Map<String, Set<Integer>> takers = new HashMap<>();
            int found = 0;
            for (int turn = 0; found < 12 && turn < 100; turn++) {
                Message got = (turn % 2 == 0 ? a : b).receive(200);
                if (got == null) continue;
                found++;
                takers.computeIfAbsent(got.getStringProperty("JMSXGroupID"), key -> new HashSet<>()).add(turn % 2);
            }
            equal(12, found);
            for (Set<Integer> each : takers.values()) equal(1, each.size());
        }
    }

    static void completionOrder() throws Exception {
        try (Connection connection = connect(null)) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            MessageProducer producer = session.createProducer(session.createQueue("j.async-order"));
            List<String> order = Collections.synchronizedList(new ArrayList<>());
            CountDownLatch done = new CountDownLatch(20);
            List<String> wanted = new ArrayList<>();
            for (int number = 0; number < 20; number++) {
                wanted.add("" + number);
                producer.send(session.createTextMessage("" + number), new CompletionListener() {
                    public void onCompletion(Message message) {
                        try { order.add(text(message)); } catch (JMSException error) { order.add("" + error); }
                        done.countDown();
                    }
                    public void onException(Message message, Exception error) { order.add("" + error); done.countDown(); }
                });
            }
            equal(true, done.await(10, TimeUnit.SECONDS));
            equal(wanted, order);
        }
    }

    static void oneConsumer() throws Exception {
        try (Connection connection = connect("j.one")) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Session other = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Topic topic = session.createTopic("j/one");
            MessageConsumer first = session.createDurableConsumer(topic, "sub");
            try {
                other.createDurableConsumer(topic, "sub");
                throw new AssertionError("two consumers have one unshared durable subscription");
            } catch (JMSException expected) {
                // as it should be
            }
            first.close();
            session.unsubscribe("sub");
        }
    }

    static void changedSelector() throws Exception {
        try (Connection connection = connect("j.changed")) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Topic topic = session.createTopic("j/changed");
            session.createDurableConsumer(topic, "sub", "n = 1", false).close();
            TextMessage made = session.createTextMessage("for the old one");
            made.setIntProperty("n", 1);
            MessageProducer producer = session.createProducer(topic);
            producer.send(made);
            MessageConsumer consumer = session.createDurableConsumer(topic, "sub", "n = 2", false);
            equal(null, consumer.receive(200));
            TextMessage next = session.createTextMessage("for the new one");
            next.setIntProperty("n", 2);
            producer.send(next);
            equal("for the new one", text(consumer.receive(30000)));
            consumer.close();
            session.unsubscribe("sub");
        }
    }

    static void oversized() throws Exception {
        try (Connection connection = connect(null)) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            for (Destination destination : new Destination[] {session.createQueue("j.large"), session.createTopic("j/large")}) {
                MessageProducer producer = session.createProducer(destination);
                BytesMessage large = session.createBytesMessage();
                large.writeBytes(new byte[9 << 20]);
                try {
                    producer.send(large);
                    throw new AssertionError("a message above the limit was accepted");
                } catch (JMSException expected) {
                    if (!expected.getMessage().contains("at most")) {
                        throw expected;
                    }
                }
                session.createProducer(destination).send(session.createTextMessage("small"));
            }
        }
    }

    static void noTopic() throws Exception {
        try (Connection connection = connect(null)) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            try {
                session.createProducer(session.createTopic("a/*"));
                throw new AssertionError("one may send to a pattern");
            } catch (InvalidDestinationException expected) {
                // as it should be
            }
        }
    }

    static void forbidden() throws Exception {
        try (Connection connection = connect(null)) {
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            try {
                session.createProducer(session.createTopic("secret/plans"));
                throw new AssertionError("one may send to a forbidden topic");
            } catch (JMSSecurityException expected) {
                // as it should be
            }
        }
    }

    static void noCredit() throws Exception {
        String idle = url + "?jms.prefetchPolicy.all=0";
        try (Connection slow = new JmsConnectionFactory("ann", "correct horse", idle).createConnection();
             Connection connection = connect(null)) {
            slow.start();
            Session waiting = slow.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Queue queue = waiting.createQueue("j.credit");
            MessageConsumer without = waiting.createConsumer(queue);
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            session.createProducer(queue).send(session.createTextMessage("one"));
            equal("one", text(session.createConsumer(queue).receive(30000)));
            equal(null, without.receive(100));
        }
    }

    static void sasl(String where, String mechanism) throws Exception {
        String with = where + (where.contains("?") ? "&" : "?") + "amqp.saslMechanisms=" + mechanism;
        JmsConnectionFactory factory = mechanism.equals("ANONYMOUS")
            ? new JmsConnectionFactory(with) : new JmsConnectionFactory("ann", "correct horse", with);
        try (Connection connection = factory.createConnection()) {
            connection.start();
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            Queue queue = session.createQueue("j.sasl." + mechanism);
            session.createProducer(queue).send(session.createTextMessage("in"));
            equal("in", text(session.createConsumer(queue).receive(30000)));
        }
    }
}

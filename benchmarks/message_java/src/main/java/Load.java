import java.io.*;
import java.lang.management.ManagementFactory;
import java.util.*;
import java.util.concurrent.*;
import java.util.function.LongConsumer;

/**
 * The paper's client: "qpid URL" or "openwire URL". Reads commands and answers each with a line of JSON:
 * "subscribe CONNECTIONS SUBSCRIBERS" makes idle subscribers, "run COUNT BYTES RATE" publishes so many texts (at
 * RATE a second, 0 being as quickly as it goes) and tells the transit delays at the measuring subscriber. Where sending
 * itself is held up, a message's delay counts from when it was due: else a slow provider would seem a quick one.
 */
public final class Load {
    static final String TOPIC = "bench/topic";

    /** What differs between two packages of one API. */
    interface Door extends AutoCloseable {
        void subscribe(LongConsumer sentAtNanos) throws Exception;
        void publish(String text) throws Exception;
    }

    static final class Qpid implements Door {
        final jakarta.jms.Connection connection;
        final jakarta.jms.Session publishing;
        jakarta.jms.MessageProducer producer;

        Qpid(String url) throws Exception {
            connection = new org.apache.qpid.jms.JmsConnectionFactory(url).createConnection();
            connection.start();
            publishing = connection.createSession(false, jakarta.jms.Session.AUTO_ACKNOWLEDGE);
        }

        public void subscribe(LongConsumer heard) throws Exception {
            var session = connection.createSession(false, jakarta.jms.Session.AUTO_ACKNOWLEDGE);
            session.createConsumer(session.createTopic(TOPIC)).setMessageListener(message -> {
                try {
                    heard.accept(Long.parseLong(((jakarta.jms.TextMessage) message).getText().substring(0, 20)));
                } catch (jakarta.jms.JMSException error) {
                    throw new IllegalStateException(error);
                }
            });
        }

        public void publish(String text) throws Exception {
            if (producer == null) {
                producer = publishing.createProducer(publishing.createTopic(TOPIC));
                producer.setDeliveryMode(jakarta.jms.DeliveryMode.NON_PERSISTENT);
            }
            producer.send(publishing.createTextMessage(text));
        }

        public void close() throws Exception { connection.close(); }
    }

    static final class OpenWire implements Door {
        final javax.jms.Connection connection;
        final javax.jms.Session publishing;
        javax.jms.MessageProducer producer;

        OpenWire(String url) throws Exception {
            connection = new org.apache.activemq.ActiveMQConnectionFactory(url).createConnection();
            connection.start();
            publishing = connection.createSession(false, javax.jms.Session.AUTO_ACKNOWLEDGE);
        }

        public void subscribe(LongConsumer heard) throws Exception {
            var session = connection.createSession(false, javax.jms.Session.AUTO_ACKNOWLEDGE);
            session.createConsumer(session.createTopic(TOPIC)).setMessageListener(message -> {
                try {
                    heard.accept(Long.parseLong(((javax.jms.TextMessage) message).getText().substring(0, 20)));
                } catch (javax.jms.JMSException error) {
                    throw new IllegalStateException(error);
                }
            });
        }

        public void publish(String text) throws Exception {
            if (producer == null) {
                producer = publishing.createProducer(publishing.createTopic(TOPIC));
                producer.setDeliveryMode(javax.jms.DeliveryMode.NON_PERSISTENT);
            }
            producer.send(publishing.createTextMessage(text));
        }

        public void close() throws Exception { connection.close(); }
    }

    static Door door(String kind, String url) throws Exception {
        return kind.equals("qpid") ? new Qpid(url) : new OpenWire(url);
    }

    public static void main(String[] arguments) throws Exception {
        String kind = arguments[0], url = arguments[1];
        var machine = (com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
        Door publisher = door(kind, url);
        Door measuring = door(kind, url);
        List<Door> idle = new ArrayList<>();
        BlockingQueue<Long> delays = new LinkedBlockingQueue<>();
        measuring.subscribe(sent -> delays.add(System.nanoTime() - sent));
        say("{}");
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = in.readLine()) != null; ) {
            String[] words = line.split(" ");
            if (words[0].equals("subscribe")) {
                int connections = Integer.parseInt(words[1]), subscribers = Integer.parseInt(words[2]);
                for (int number = 0; number < connections; number++) idle.add(door(kind, url));
                for (int number = 0; number < subscribers; number++) idle.get(number % connections).subscribe(sent -> { });
                say("{}");
                continue;
            }
            if (words[0].equals("unsubscribe")) {
                for (Door one : idle) one.close();
                idle.clear();
                say("{}");
                continue;
            }
            int count = Integer.parseInt(words[1]), size = Integer.parseInt(words[2]);
            double rate = Double.parseDouble(words[3]);
            String padding = "x".repeat(Math.max(0, size - 20));
            double cpu = machine.getProcessCpuTime() / 1e9;
            long began = System.nanoTime();
            for (int number = 0; number < count; number++) {
                long now = System.nanoTime(), due = rate > 0 ? (long) (began + number * 1e9 / rate) : now;
                if (due > now) {
                    TimeUnit.NANOSECONDS.sleep(due - now);
                    due = System.nanoTime();
                }
                publisher.publish(String.format("%020d", due) + padding);
            }
            StringBuilder found = new StringBuilder();
            for (int number = 0; number < count; number++) {
                Long delay = delays.poll(10, TimeUnit.SECONDS);
                if (delay == null) break;
                found.append(found.isEmpty() ? "" : ",").append(delay / 1000);
            }
            double took = (System.nanoTime() - began) / 1e9;
            say(String.format(Locale.ROOT, "{\"took_s\": %.6f, \"cpu_s\": %.6f, \"delays_us\": [%s]}",
                took, machine.getProcessCpuTime() / 1e9 - cpu, found));
        }
        Runtime.getRuntime().halt(0);
    }

    static void say(String line) {
        System.out.println(line);
        System.out.flush();
    }
}

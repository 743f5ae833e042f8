import java.io.*;
import java.nio.*;
import java.nio.file.*;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.Consumer;

/**
 * The JMS clients of one provider: "qpid URL" or "openwire URL". Reads commands and answers each with a line of JSON.
 *
 * "subscribe CONNECTIONS SUBSCRIBERS": replaces the subscribers of the topic; they are spread evenly over connections.
 * "run COUNT BYTES RATE FILE": publishes so many non-persistent texts, at RATE a second (0: as quickly as possible), and
 * writes the transit delays of every subscriber to FILE: 32-bit microseconds, little-endian, one subscriber after the
 * other, -1 where a message did not arrive. Where sending is held up, a delay counts from when the message was due.
 * "store COUNT BYTES SENDERS QUEUES": persistent texts by so many senders, each on its own connection and waiting for
 * each acknowledgement, to the queues in turn, each with a consumer on its own connection; when the last was
 * acknowledged and when it was received.
 */
public final class Load {
    static final String TOPIC = "bench/topic";
    static final long BASE = 1_000_000_000_000_000_000L;  // makes a time 19 digits long
    static final int TIME_DIGITS = 19, RUN_DIGITS = 6;
    static final long QUIET_NANOS = TimeUnit.SECONDS.toNanos(10);

    interface Publisher { void publish(String text) throws Exception; }

    /** One connection; what differs between two packages of one API. */
    interface Client extends AutoCloseable {
        void subscribe(String queue, Consumer<String> listener) throws Exception;  // null: the topic
        Publisher publisher(String queue) throws Exception;
    }

    static final class Qpid implements Client {
        final jakarta.jms.Connection connection;

        Qpid(String url) throws Exception {
            connection = new org.apache.qpid.jms.JmsConnectionFactory(url).createConnection();
            connection.start();
        }

        jakarta.jms.Session session() throws Exception {
            return connection.createSession(false, jakarta.jms.Session.AUTO_ACKNOWLEDGE);
        }

        public void subscribe(String queue, Consumer<String> listener) throws Exception {
            var session = session();
            var from = queue != null ? session.createQueue(queue) : session.createTopic(TOPIC);
            session.createConsumer(from).setMessageListener(message -> {
                try {
                    listener.accept(((jakarta.jms.TextMessage) message).getText());
                } catch (jakarta.jms.JMSException error) {
                    throw new IllegalStateException(error);
                }
            });
        }

        public Publisher publisher(String queue) throws Exception {
            var session = session();
            var producer = session.createProducer(queue != null ? session.createQueue(queue) : session.createTopic(TOPIC));
            producer.setDeliveryMode(queue != null ? jakarta.jms.DeliveryMode.PERSISTENT : jakarta.jms.DeliveryMode.NON_PERSISTENT);
            return text -> producer.send(session.createTextMessage(text));
        }

        public void close() throws Exception { connection.close(); }
    }

    static final class OpenWire implements Client {
        final javax.jms.Connection connection;

        OpenWire(String url) throws Exception {
            connection = new org.apache.activemq.ActiveMQConnectionFactory(url).createConnection();
            connection.start();
        }

        javax.jms.Session session() throws Exception {
            return connection.createSession(false, javax.jms.Session.AUTO_ACKNOWLEDGE);
        }

        public void subscribe(String queue, Consumer<String> listener) throws Exception {
            var session = session();
            var from = queue != null ? session.createQueue(queue) : session.createTopic(TOPIC);
            session.createConsumer(from).setMessageListener(message -> {
                try {
                    listener.accept(((javax.jms.TextMessage) message).getText());
                } catch (javax.jms.JMSException error) {
                    throw new IllegalStateException(error);
                }
            });
        }

        public Publisher publisher(String queue) throws Exception {
            var session = session();
            var producer = session.createProducer(queue != null ? session.createQueue(queue) : session.createTopic(TOPIC));
            producer.setDeliveryMode(queue != null ? javax.jms.DeliveryMode.PERSISTENT : javax.jms.DeliveryMode.NON_PERSISTENT);
            return text -> producer.send(session.createTextMessage(text));
        }

        public void close() throws Exception { connection.close(); }
    }

    /** What one subscriber saw of one run. A session calls its listener in one thread. */
    static final class Seen {
        final int[] delays;
        final AtomicInteger count = new AtomicInteger();
        volatile long lastNanos;

        Seen(int count) {
            delays = new int[count];
            Arrays.fill(delays, -1);
        }

        void add(long delayNanos, long now) {
            int place = count.get();
            if (place < delays.length) {
                delays[place] = (int) Math.min(Integer.MAX_VALUE, delayNanos / 1000);
                lastNanos = now;
                count.lazySet(place + 1);
            }
        }
    }

    record Run(int number, List<Seen> seen) { }

    final String kind, url;
    final List<Client> subscribing = new ArrayList<>();
    int subscribers;
    volatile Run run = new Run(0, List.of());

    Load(String kind, String url) {
        this.kind = kind;
        this.url = url;
    }

    Client client() throws Exception { return kind.equals("qpid") ? new Qpid(url) : new OpenWire(url); }

    String subscribe(int connections, int count) throws Exception {
        for (Client client : subscribing) client.close();
        subscribing.clear();
        for (int number = 0; number < connections; number++) subscribing.add(client());
        for (int number = 0; number < count; number++) {
            int mine = number;
            subscribing.get(number % connections).subscribe(null, text -> arrived(mine, text));
        }
        subscribers = count;
        return "{}";
    }

    void arrived(int subscriber, String text) {
        long now = System.nanoTime();
        Run current = run;
        if (Integer.parseInt(text, TIME_DIGITS, TIME_DIGITS + RUN_DIGITS, 10) == current.number)
            current.seen.get(subscriber).add(now - (Long.parseLong(text, 0, TIME_DIGITS, 10) - BASE), now);
    }

    String publish(Publisher publisher, int count, int size, double rate, String file) throws Exception {
        List<Seen> seen = new ArrayList<>();
        for (int number = 0; number < subscribers; number++) seen.add(new Seen(count));
        run = new Run(run.number + 1, seen);
        String rest = String.format("%0" + RUN_DIGITS + "d", run.number);
        rest += "x".repeat(Math.max(0, size - TIME_DIGITS - RUN_DIGITS));
        long began = System.nanoTime();
        for (int number = 0; number < count; number++) {
            long now = System.nanoTime(), due = rate > 0 ? (long) (began + number * 1e9 / rate) : now;
            if (due > now) {
                TimeUnit.NANOSECONDS.sleep(due - now);
                due = System.nanoTime();
            }
            publisher.publish(BASE + due + rest);
        }
        long received = settled(seen, (long) count * subscribers);
        long last = seen.stream().mapToLong(each -> each.lastNanos).max().orElse(began);
        if (!file.equals("-")) write(seen, file);
        return String.format(Locale.ROOT, "{\"took_s\": %.6f, \"received\": %d}", (last - began) / 1e9, received);
    }

    /** How many arrived: all of them, or those until nothing came for a while. */
    static long settled(List<Seen> seen, long wanted) throws InterruptedException {
        long received = -1, since = System.nanoTime();
        while (true) {
            long now = seen.stream().mapToLong(each -> each.count.get()).sum();
            if (now == wanted) return now;
            if (now != received) since = System.nanoTime();
            else if (System.nanoTime() - since > QUIET_NANOS) return now;
            received = now;
            Thread.sleep(5);
        }
    }

    static void write(List<Seen> seen, String file) throws IOException {
        var bytes = ByteBuffer.allocate(4 * seen.stream().mapToInt(each -> each.delays.length).sum());
        var integers = bytes.order(ByteOrder.LITTLE_ENDIAN).asIntBuffer();
        for (Seen each : seen) integers.put(each.delays);
        Files.write(Path.of(file), bytes.array());
    }

    String store(int count, int size, int senders, int queues) throws Exception {
        String text = "x".repeat(size);
        int each = count / senders;
        var all = new CountDownLatch(each * senders);
        List<Client> clients = new ArrayList<>();
        try (var threads = new Threads(senders)) {
            for (int number = 0; number < queues; number++) {
                clients.add(client());
                clients.get(number).subscribe("bench-queue-" + number, got -> all.countDown());
            }
            List<Publisher> publishers = new ArrayList<>();
            for (int number = 0; number < senders; number++) {
                clients.add(client());
                publishers.add(clients.get(queues + number).publisher("bench-queue-" + number % queues));
            }
            long began = System.nanoTime();
            List<Future<?>> sending = new ArrayList<>();
            for (Publisher publisher : publishers)
                sending.add(threads.pool.submit(() -> {
                    for (int number = 0; number < each; number++) publisher.publish(text);
                    return null;
                }));
            for (Future<?> sender : sending) sender.get();
            long sent = System.nanoTime();
            if (!all.await(30, TimeUnit.SECONDS)) throw new IllegalStateException(all.getCount() + " did not arrive");
            return String.format(Locale.ROOT, "{\"sent_s\": %.6f, \"took_s\": %.6f, \"received\": %d}",
                (sent - began) / 1e9, (System.nanoTime() - began) / 1e9, each * senders);
        } finally {
            for (Client client : clients) client.close();
        }
    }

    record Threads(ExecutorService pool) implements AutoCloseable {
        Threads(int count) { this(Executors.newFixedThreadPool(count)); }
        public void close() { pool.shutdownNow(); }
    }

    public static void main(String[] arguments) throws Exception {
        var load = new Load(arguments[0], arguments[1]);
        Publisher publisher = load.client().publisher(null);
        say("{}");
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = in.readLine()) != null; ) {
            String[] words = line.split(" ");
            int first = Integer.parseInt(words[1]), second = Integer.parseInt(words[2]);
            say(switch (words[0]) {
                case "subscribe" -> load.subscribe(first, second);
                case "store" -> load.store(first, second, Integer.parseInt(words[3]), Integer.parseInt(words[4]));
                default -> load.publish(publisher, first, second, Double.parseDouble(words[3]), words[4]);
            });
        }
        Runtime.getRuntime().halt(0);
    }

    static void say(String line) {
        System.out.println(line);
        System.out.flush();
    }
}

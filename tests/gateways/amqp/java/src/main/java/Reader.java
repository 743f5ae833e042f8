import jakarta.jms.*;
import org.apache.qpid.jms.JmsConnectionFactory;

/**
 * Reads the topic "news" by a durable subscription, over whichever gateway of a failover URL lives, until it is
 * stopped. Says "read TEXT" or "read TEXT again", the latter of what came marked as redelivered.
 */
public final class Reader {
    public static void main(String[] arguments) throws Exception {
        Connection connection = new JmsConnectionFactory("ann", "correct horse", arguments[0]).createConnection();
        connection.setClientID("reader");
        connection.start();
        Session session = connection.createSession(false, Session.CLIENT_ACKNOWLEDGE);
        MessageConsumer consumer = session.createDurableConsumer(session.createTopic("news"), "all");
        System.out.println("ready");
        while (true) {
            try {
                TextMessage got = (TextMessage) consumer.receive(1000);
                if (got == null) continue;
                System.out.println("read " + got.getText() + (got.getJMSRedelivered() ? " again" : ""));
                got.acknowledge();
            } catch (JMSException error) {
                System.out.println("trouble: " + error.getClass().getSimpleName());
                Thread.sleep(50);
            }
        }
    }
}

import jakarta.jms.*;
import jakarta.jms.Queue;
import org.apache.qpid.jms.JmsConnectionFactory;

/**
 * Moves messages from the queue "in" to the queue "out", each in a transaction of its own, until it is stopped; over
 * whichever gateway of a failover URL lives. Says "moved TEXT" when a commit was confirmed.
 */
public final class Mover {
    public static void main(String[] arguments) throws Exception {
        Connection connection = new JmsConnectionFactory("ann", "correct horse", arguments[0]).createConnection();
        connection.start();
        Session session = connection.createSession(true, Session.SESSION_TRANSACTED);
        Queue in = session.createQueue("in"), out = session.createQueue("out");
        MessageConsumer consumer = session.createConsumer(in);
        MessageProducer producer = session.createProducer(out);
        System.out.println("ready");
        while (true) {
            try {
                TextMessage got = (TextMessage) consumer.receive(1000);
                if (got == null) continue;
                producer.send(session.createTextMessage(got.getText()));
                session.commit();
                System.out.println("moved " + got.getText());
            } catch (JMSException error) {
                System.out.println("again: " + error.getClass().getSimpleName());
                try { session.rollback(); } catch (JMSException ignored) { Thread.sleep(50); }
            }
        }
    }
}

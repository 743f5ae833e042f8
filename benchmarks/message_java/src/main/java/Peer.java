import java.net.ServerSocket;
import org.apache.activemq.artemis.core.config.impl.ConfigurationImpl;
import org.apache.activemq.artemis.core.server.embedded.EmbeddedActiveMQ;
import org.apache.activemq.artemis.core.settings.impl.AddressSettings;

/**
 * A broker to compare with, in memory only: "artemis FOLDER" or "activemq FOLDER". Says its port, and ends with its
 * standard input.
 */
public final class Peer {
    public static void main(String[] arguments) throws Exception {
        int port;
        try (ServerSocket free = new ServerSocket(0)) { port = free.getLocalPort(); }
        if (arguments[0].equals("artemis")) artemis(port, arguments[1]);
        else activemq(port, arguments[1]);
        System.out.println("{\"port\": " + port + "}");
        System.out.flush();
        while (System.in.read() >= 0) { }
        Runtime.getRuntime().halt(0);
    }

    static void artemis(int port, String folder) throws Exception {
        var configuration = new ConfigurationImpl();
        configuration.setSecurityEnabled(false).setPersistenceEnabled(false);
        configuration.setJournalDirectory(folder + "/journal").setBindingsDirectory(folder + "/bindings");
        configuration.setPagingDirectory(folder + "/paging").setLargeMessagesDirectory(folder + "/large");
        configuration.addAcceptorConfiguration("amqp", "tcp://127.0.0.1:" + port + "?protocols=AMQP;tcpNoDelay=true");
        configuration.addAddressSetting("#", new AddressSettings().setAutoCreateAddresses(true).setAutoCreateQueues(true));
        new EmbeddedActiveMQ().setConfiguration(configuration).start();
    }

    static void activemq(int port, String folder) throws Exception {
        var broker = new org.apache.activemq.broker.BrokerService();
        broker.setPersistent(false);
        broker.setUseJmx(false);
        broker.setDataDirectory(folder);
        broker.addConnector("tcp://127.0.0.1:" + port);
        broker.start();
        broker.waitUntilStarted();
    }
}

import java.io.RandomAccessFile;
import java.net.ServerSocket;
import java.nio.ByteBuffer;
import org.apache.activemq.artemis.core.config.impl.ConfigurationImpl;
import org.apache.activemq.artemis.core.server.JournalType;
import org.apache.activemq.artemis.core.server.embedded.EmbeddedActiveMQ;
import org.apache.activemq.artemis.core.settings.impl.AddressSettings;
import org.apache.activemq.artemis.nativo.jlibaio.LibaioContext;

/**
 * A broker to compare with: "artemis FOLDER" or "activemq FOLDER". It keeps persistent messages on disk and syncs them
 * before it acknowledges them. Prints its port and its sync settings as JSON, and ends with its standard input.
 */
public final class Peer {
    static final int SYNCS = 200;

    public static void main(String[] arguments) throws Exception {
        int port;
        try (ServerSocket free = new ServerSocket(0)) { port = free.getLocalPort(); }
        String settings = arguments[0].equals("artemis") ? artemis(port, arguments[1]) : activemq(port, arguments[1]);
        System.out.println("{\"port\": " + port + ", \"settings\": \"" + settings + "\"}");
        System.out.flush();
        while (System.in.read() >= 0) { }
        Runtime.getRuntime().halt(0);
    }

    static String artemis(int port, String folder) throws Exception {
        var configuration = new ConfigurationImpl();
        configuration.setSecurityEnabled(false).setPersistenceEnabled(true);
        configuration.setJournalDirectory(folder + "/journal").setBindingsDirectory(folder + "/bindings");
        configuration.setPagingDirectory(folder + "/paging").setLargeMessagesDirectory(folder + "/large");
        int syncNanos = syncNanos(folder);
        boolean isNative = LibaioContext.isLoaded();
        configuration.setJournalType(isNative ? JournalType.ASYNCIO : JournalType.NIO).setJournalDatasync(true);
        configuration.setJournalSyncNonTransactional(true).setJournalSyncTransactional(true);
        configuration.setJournalBufferTimeout_NIO(syncNanos).setJournalBufferTimeout_AIO(syncNanos);
        configuration.addAcceptorConfiguration("amqp", "tcp://127.0.0.1:" + port + "?protocols=AMQP;tcpNoDelay=true");
        configuration.addAddressSetting("#", new AddressSettings().setAutoCreateAddresses(true).setAutoCreateQueues(true));
        new EmbeddedActiveMQ().setConfiguration(configuration).start();
        return (isNative ? "native journal (libaio)" : "NIO journal (without libaio)") + ", datasync on, sync of non-transactional sends on, buffer timeout " + syncNanos / 1000 + " us";
    }

    /** The time of one small synced write: what "artemis create" measures to set the journal's buffer timeout. */
    static int syncNanos(String folder) throws Exception {
        new java.io.File(folder).mkdirs();
        try (var file = new RandomAccessFile(folder + "/trial", "rw")) {
            var channel = file.getChannel();
            var page = ByteBuffer.allocateDirect(4096);
            long began = System.nanoTime();
            for (int number = 0; number < SYNCS; number++) {
                page.clear();
                channel.write(page, 0);
                channel.force(false);
            }
            return (int) ((System.nanoTime() - began) / SYNCS);
        }
    }

    static String activemq(int port, String folder) throws Exception {
        var store = new org.apache.activemq.store.kahadb.KahaDBPersistenceAdapter();
        store.setDirectory(new java.io.File(folder + "/kahadb"));
        store.setJournalDiskSyncStrategy("always");
        var broker = new org.apache.activemq.broker.BrokerService();
        broker.setPersistenceAdapter(store);
        broker.setUseJmx(false);
        broker.setDataDirectory(folder);
        broker.addConnector("tcp://127.0.0.1:" + port);
        broker.start();
        broker.waitUntilStarted();
        return "KahaDB, journalDiskSyncStrategy=" + store.getJournalDiskSyncStrategy();
    }
}

// A queue and a topic through rhea: says what it got, and ends with 0 if it got all of it.
const container = require('rhea');
const port = parseInt(process.argv[2]);
const connection = container.connect({
  host: '127.0.0.1', port: port, username: 'ann', password: 'correct horse', reconnect: false,
});
let got = 0;
container.on('connection_open', () => {
  connection.open_receiver('queue:rhea');
  connection.open_receiver('topic:rhea/news');
});
let opened = 0;
container.on('receiver_open', () => {
  if (++opened === 2) {
    connection.open_sender('queue:rhea');
    connection.open_sender('topic:rhea/news');
  }
});
container.once('sendable', () => {});
container.on('sender_open', (context) => {
  context.sender.once('sendable', () => context.sender.send({
    body: 'hello', durable: context.sender.target.address === 'queue:rhea', application_properties: { n: 4 },
  }));
});
container.on('message', (context) => {
  console.log('got', context.message.body, JSON.stringify(context.message.application_properties));
  if (++got === 2) connection.close();
});
container.on('connection_close', () => process.exit(got === 2 ? 0 : 1));
container.on('disconnected', () => process.exit(2));
setTimeout(() => process.exit(3), 30000);

"""The one request/reply server and client of Muster's services, over the bus.

Layers, so that a data path pays only for what it uses:

- `requests.accept(message, pattern, refused)`: the sender, the operation, and that the reply subject is the
  sender's own.  Every service uses at least this one.
- `faults`: errors to their form on the wire and back; unknown codes keep code and exit status.
- `server.Server`: declared operations (`server.Operation`), authorization, bounded concurrency, errors,
  request ids, oversize results, `server.page` for lists, and the audit (`auditing.Audit`).
- `client.call`, `client.pages`, `client.exchange`: time-outs, retries, error decoding.

Requests are ``muster.<part>.from.<identity>.<operation>`` with a JSON object of arguments (other forms: give
`Operation.decode` and a `server.Codec`), replies ``{"result": …}`` or ``{"error": Fault}``.  An operation
whose first level is ``read`` changes nothing.
"""

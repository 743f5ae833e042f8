"""The one request/reply server and client of Muster's services, over the bus.

Layers, so that a data path uses only what it needs:

- `requests.accept(message, pattern, refused)`: checks the sender, the operation, and that the reply subject
  belongs to the sender.  Every service uses at least this layer.
- `admission`: the share of a service's time that each identity may use, checked in `requests.accept` before
  anything is decoded.
- `error_replies`: errors to their wire format and back; unknown codes keep code and exit status.
- `server.RpcServer`: declared operations (`server.RpcOperation`), authorization, bounded concurrency,
  errors, request ids, oversize results, `server.page` for lists, and the audit
  (`request_audit.RequestAudit`).
- `client.call`, `client.pages`, `client.exchange`: timeouts, retries, error decoding.

Requests are ``muster.<part>.from.<identity>.<operation>`` with a JSON object of arguments (for other formats
pass `RpcOperation.decode` and a `server.RpcCodec`), replies ``{"result": …}`` or ``{"error": …}``. An
operation whose first level is ``read`` changes nothing.
"""

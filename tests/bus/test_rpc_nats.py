"""`bus/rpc` on a real broker."""

from __future__ import annotations

from tests.bus import rpc_contract


class TestRpcOnNats(rpc_contract.RpcContract):
    pass

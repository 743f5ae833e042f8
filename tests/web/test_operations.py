"""The tables of operations: every entry names a method of a client and fields of its rows."""

from __future__ import annotations

import importlib
import inspect
import typing
from typing import Any

import msgspec
import pytest

from muster.bus.rpc import operations
from muster.manage import rows as manage_rows
from muster.notify import rows as notify_rows

SERVICES = ("manage", "pipeline", "notify", "bus.brokers")
DECLARED = {
    f"{service} {declared.method}": declared
    for service in SERVICES
    for declared in vars(importlib.import_module(f"muster.{service}.operations")).values()
    if isinstance(declared, operations.ServiceOperation)
}
PAGES: dict[Any, type[msgspec.Struct]] = {
    manage_rows.ResourcePage: manage_rows.ResourceRow,
    notify_rows.ReceiverList: notify_rows.ReceiverRow,
}


@pytest.mark.parametrize("declared", DECLARED.values(), ids=DECLARED)
def test_an_operation_is_a_method_of_a_client_with_rows_that_have_the_columns(
    declared: operations.ServiceOperation,
):
    assert inspect.iscoroutinefunction(declared.function)
    assert declared.help.endswith(".")
    returns = declared.returns
    row = PAGES.get(returns) or (typing.get_args(returns) or [returns])[0]
    if declared.columns:
        assert {column.removesuffix("?") for column in declared.columns} <= set(row.__struct_fields__)
    request = [*inspect.signature(declared.function).parameters][1:]
    assert declared.target.format(**dict.fromkeys(request, "")) is not None
    assert bool(declared.action) == bool(declared.target)

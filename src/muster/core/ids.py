"""Typed ids: a `ManagerId` cannot be passed where a `ResourceId` is meant, and each is a plain string."""

from __future__ import annotations

from typing import NewType

DomainId = NewType("DomainId", str)
Identity = NewType("Identity", str)  # a process's name as the broker enforces it
BrokerId = NewType("BrokerId", str)
AgentId = NewType("AgentId", str)
ManagerId = NewType("ManagerId", str)
ResourceId = NewType("ResourceId", str)
ParticipantId = NewType("ParticipantId", str)
ChannelId = NewType("ChannelId", str)
NodeId = NewType("NodeId", str)  # an information node
ContextKey = NewType("ContextKey", str)
Epoch = NewType("Epoch", int)

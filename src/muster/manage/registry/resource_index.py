"""Indexes of the registry's resources: by agent, by manager, by dependency and by former name. Pure.

With them, the work for a change depends on the change and not on the size of the fleet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from muster.manage.registry import assignments

K = TypeVar("K")


class ResourceIndex:
    def __init__(self) -> None:
        self.owned: dict[tuple[str, int], set[str]] = {}  # by manager and boot
        self.unowned: set[str] = set()
        self.hosted: dict[str, set[str]] = {}  # by agent
        self.renamed: dict[str, str] = {}  # by former name, until the agent has renamed it
        self.dependants: dict[str, set[str]] = {}  # by the name that they depend on

    def set_resource(
        self,
        name: str,
        before: assignments.ResourceRecord | None,
        resource: assignments.ResourceRecord | None,
        *,
        has_owner: bool,
    ) -> None:
        if before is not None:
            for dependency in before.spec.depends_on:
                self.dependants.get(dependency, set()).discard(name)
            if self.renamed.get(before.formerly) == name:
                del self.renamed[before.formerly]
            _discard(self.hosted, before.spec.agent, name)
        if resource is None:
            self.unowned.discard(name)
            return
        self.hosted.setdefault(resource.spec.agent, set()).add(name)
        for dependency in resource.spec.depends_on:
            self.dependants.setdefault(dependency, set()).add(name)
        if resource.formerly:
            self.renamed[resource.formerly] = name
        if not has_owner:
            self.unowned.add(name)

    def set_owner(
        self,
        name: str,
        before: assignments.ResourceOwner | None,
        owner: assignments.ResourceOwner | None,
        *,
        exists: bool,
    ) -> None:
        if before is not None:
            _discard(self.owned, (before.manager, before.boot), name)
        if owner is not None:
            self.unowned.discard(name)
            self.owned.setdefault((owner.manager, owner.boot), set()).add(name)
        elif exists:
            self.unowned.add(name)

    def check(
        self,
        resources: dict[str, assignments.ResourceRecord],
        owners: dict[str, assignments.ResourceOwner],
    ) -> None:
        """For tests: compare with an index that is made anew."""
        anew = ResourceIndex()
        for name, resource in resources.items():
            anew.set_resource(name, None, resource, has_owner=name in owners)
        for name, owner in owners.items():
            anew.set_owner(name, None, owner, exists=True)
        dependants = {name: others for name, others in self.dependants.items() if others}
        assert vars(self) | {"dependants": dependants} == vars(anew)


def _discard(index: dict[K, set[str]], key: K, name: str) -> None:
    names = index[key]
    names.discard(name)
    if not names:
        del index[key]

"""The publication port: saving, deleting, and what publishers say of each other's businesses.

A save is checked whole before the first of it is written: keys, owners, parents.  Then the entities are
written one after the other, children first, each under compare-and-set on what was checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from muster.core.formats import xml
from muster.gateways.uddi import inquiry, plain_entries, records, registry
from muster.gateways.uddi.model import entities, faults, keys, schema, standard_tmodels
from muster.inform import service_entries

U = schema.UDDI


@dataclass(slots=True)
class _Save:
    """One entity on its way in."""

    kind: str
    element: xml.XmlElement
    before: records.UddiRecord | None
    entry: service_entries.ServiceEntry | None = None  # where it was saved without UDDI, and stays so


class PublicationHandler:
    def __init__(
        self,
        held: registry.UddiRegistry,
        asked: inquiry.InquiryHandler,
        new_key: Callable[[], str] = keys.new_key,
    ) -> None:
        self._registry = held
        self._inquiry = asked
        self._new_key = new_key

    # Saving.

    async def save_business(self, asked: xml.XmlElement, publisher: registry.UddiPublisher) -> xml.XmlElement:
        planned: list[_Save] = []
        wanted: dict[str, set[str]] = {}
        for given in asked.all(U("businessEntity")):
            whole = await self._keyed("business", given, publisher, planned)
            key = whole.element.get("businessKey") or ""
            inside = []
            for service in entities.services(given):
                other = service.get("businessKey")
                if other and other != key:
                    inside.append(await self._projected(service))
                    continue
                saved = await self._service(
                    entities.with_attributes(service, businessKey=key), publisher, planned
                )
                inside.append(saved)
            wanted[key] = {one.get("serviceKey") or "" for one in inside}
            whole.element = entities.with_part(
                whole.element, "discoveryURLs name description contacts businessServices", None
            )
        gone = [
            one
            for key, kept in wanted.items()
            for one in await self._registry.services_of(key)
            if one.key not in kept
        ]
        await self._write(planned, publisher)
        for one in gone:
            await self._registry.delete(publisher, one)
        found = await self._registry.each("business", list(wanted))
        whole_ones = await asyncio.gather(*map(self._inquiry.whole_business, found))
        return xml.XmlElement(U("businessDetail"), *whole_ones)

    async def _projected(self, service: xml.XmlElement) -> xml.XmlElement:
        """Another business's service, only shown here: it must be there, and stays as it is."""
        held = await self._registry.get("service", service.get("serviceKey") or "")
        if held is None or held.business != service.get("businessKey"):
            raise faults.fault(
                faults.UddiErrorCode.INVALID_PROJECTION,
                f"{service.get('serviceKey')!r} is no service of {service.get('businessKey')!r}",
            )
        return held.element

    async def save_service(self, asked: xml.XmlElement, publisher: registry.UddiPublisher) -> xml.XmlElement:
        planned: list[_Save] = []
        for given in asked.all(U("businessService")):
            await self._service(given, publisher, planned)
        await self._write(planned, publisher)
        return xml.XmlElement(U("serviceDetail"), *(one.element for one in planned if one.kind == "service"))

    async def save_binding(self, asked: xml.XmlElement, publisher: registry.UddiPublisher) -> xml.XmlElement:
        changed: dict[str, _Save] = {}
        saved: list[xml.XmlElement] = []
        taken: set[str] = set()
        for given in asked.all(U("bindingTemplate")):
            service_key = given.get("serviceKey") or ""
            binding_key = given.get("bindingKey") or ""
            there = await self._registry.service_with(binding_key) if binding_key else None
            service_key = service_key or (there.key if there is not None else "")
            save = changed.get(service_key)
            if save is None:
                held = await self._registry.get("service", service_key)
                if held is None:
                    raise registry.unknown_key_fault(service_key, "serviceKey")
                self._check_owner(held, publisher)
                save = changed[service_key] = _Save("service", held.element, held)
            if there is not None and there.key != service_key:  # it moves
                self._check_owner(there, publisher)
                left = changed.setdefault(there.key, _Save("service", there.element, there))
                left.element = _without_bindings(left.element, {binding_key})
            elif there is None and binding_key:
                await self._check_proposed(binding_key, "bindingKey", publisher, [])
            (made,) = self._bindings([given], service_key, taken)
            saved.append(made)
            rest = [
                one
                for one in entities.bindings(save.element)
                if one.get("bindingKey") != made.get("bindingKey")
            ]
            save.element = _with_bindings(save.element, [*rest, made])
        await self._write(list(changed.values()), publisher)
        shown = [_shown(one, changed[one.get("serviceKey") or ""]) for one in saved]
        return xml.XmlElement(U("bindingDetail"), *shown)

    async def save_tModel(self, asked: xml.XmlElement, publisher: registry.UddiPublisher) -> xml.XmlElement:
        planned: list[_Save] = []
        for given in asked.all(U("tModel")):
            save = await self._keyed(
                "tmodel", entities.with_attributes(given, deleted=""), publisher, planned
            )
            key = save.element.get("tModelKey") or ""
            if keys.is_generator(key) and not _says_generator(save.element):
                raise faults.fault(
                    faults.UddiErrorCode.VALUE_NOT_ALLOWED,
                    f"{key} is the key of a generator: its category bag must say keyGenerator under "
                    f"{standard_tmodels.TYPES}",
                )
        await self._write(planned, publisher)
        return xml.XmlElement(U("tModelDetail"), *(one.element for one in planned))

    async def _service(
        self, given: xml.XmlElement, publisher: registry.UddiPublisher, planned: list[_Save]
    ) -> xml.XmlElement:
        save = await self._keyed("service", given, publisher, planned)
        business = given.get("businessKey") or (save.before.business if save.before is not None else "")
        business = business or records.DOMAIN_KEY
        if not any(one.kind == "business" and one.element.get("businessKey") == business for one in planned):
            parent = await self._registry.get("business", business)
            if parent is None:
                raise registry.unknown_key_fault(business, "businessKey")
            if business != records.DOMAIN_KEY:
                self._check_owner(parent, publisher)
        key = save.element.get("serviceKey") or ""
        taken: set[str] = set()
        bindings = entities.bindings(given)
        for one in bindings:
            proposed = one.get("bindingKey")
            if not proposed:
                continue
            there = await self._registry.service_with(proposed)
            if there is None:
                await self._check_proposed(proposed, "bindingKey", publisher, planned)
            elif there.key != key:
                self._check_owner(there, publisher)
                raise faults.fault(
                    faults.UddiErrorCode.INVALID_KEY_PASSED,
                    f"{proposed} is of another service",
                    key_type="bindingKey",
                )
        element = entities.with_attributes(save.element, businessKey=business)
        save.element = _with_bindings(element, self._bindings(bindings, key, taken))
        return save.element

    def _bindings(
        self, given: Sequence[xml.XmlElement], service: str, taken: set[str]
    ) -> list[xml.XmlElement]:
        made = []
        for one in given:
            key = one.get("bindingKey") or self._new_key()
            if key in taken:
                raise faults.fault(
                    faults.UddiErrorCode.INVALID_KEY_PASSED,
                    f"{key} stands there twice",
                    key_type="bindingKey",
                )
            taken.add(key)
            made.append(entities.with_attributes(one, bindingKey=key, serviceKey=service))
        return made

    async def _keyed(
        self, kind: str, given: xml.XmlElement, publisher: registry.UddiPublisher, planned: list[_Save]
    ) -> _Save:
        """Plan to save it, under its own key or a new one."""
        name = records.key_name(kind)
        key = given.get(name) or ""
        if key and any(one.kind == kind and one.element.get(name) == key for one in planned):
            raise faults.fault(
                faults.UddiErrorCode.INVALID_KEY_PASSED, f"{key} stands there twice", key_type=name
            )
        before = await self._registry.get(kind, key) if key else None
        if before is not None:
            self._check_owner(before, publisher)
        elif key:
            await self._check_proposed(key, name, publisher, planned)
        save = _Save(kind, entities.with_attributes(given, **{name: key or self._new_key()}), before)
        planned.append(save)
        return save

    def _check_owner(self, held: records.UddiRecord, publisher: registry.UddiPublisher) -> None:
        if held.owner != publisher.name:
            raise faults.fault(faults.UddiErrorCode.USER_MISMATCH, f"{held.key} is not {publisher.name}'s")

    async def _check_proposed(
        self, key: str, key_type: str, publisher: registry.UddiPublisher, planned: Sequence[_Save]
    ) -> None:
        keys.check(key, key_type)
        owner: dict[str, str | None] = {
            one.element.get("tModelKey") or "": publisher.name for one in planned if one.kind == "tmodel"
        }
        generator = keys.generator_of(key)
        while generator is not None:
            if generator not in owner:
                held = await self._registry.get("tmodel", generator)
                owner[generator] = None if held is None or held.deleted else held.owner
            generator = keys.generator_of(generator.rpartition(":")[0])
        if not keys.may_propose(key, publisher.name, owner.get):
            raise faults.fault(
                faults.UddiErrorCode.KEY_UNAVAILABLE,
                f"{key} is not {publisher.name}'s to give: its key generator is not theirs, or there is none",
                key_type=key_type,
            )

    async def _write(self, planned: Sequence[_Save], publisher: registry.UddiPublisher) -> None:
        order = {"service": 0, "tmodel": 1, "business": 2}
        for save in planned:
            records.check(save.kind, save.element)
            if save.before is not None and save.before.entry is not None:
                save.entry = plain_entries.edited(save.before.entry, save.element)
        for save in sorted(planned, key=lambda one: order[one.kind]):
            await self._registry.put(publisher, save.kind, save.element, save.before, entry=save.entry)
            if save.entry is not None:
                save.element = records.from_entry(save.entry)

    # Deleting.

    async def _owned(
        self, kind: str, asked: xml.XmlElement, publisher: registry.UddiPublisher
    ) -> list[records.UddiRecord]:
        found = await self._registry.each(kind, inquiry.keys_of(asked, records.key_name(kind)))
        for one in found:
            self._check_owner(one, publisher)
        return found

    async def delete_business(self, asked: xml.XmlElement, publisher: registry.UddiPublisher) -> None:
        for one in await self._owned("business", asked, publisher):
            for service in await self._registry.services_of(one.key):
                await self._registry.delete(publisher, service)
            for said in await self._own_assertions(publisher):
                if one.key in (said.source, said.target):
                    await self._registry.withdraw(publisher, said)
            await self._registry.delete(publisher, one)

    async def delete_service(self, asked: xml.XmlElement, publisher: registry.UddiPublisher) -> None:
        for one in await self._owned("service", asked, publisher):
            await self._registry.delete(publisher, one)

    async def delete_binding(self, asked: xml.XmlElement, publisher: registry.UddiPublisher) -> None:
        changed: dict[str, _Save] = {}
        for key in inquiry.keys_of(asked, "bindingKey"):
            held = await self._registry.service_with(key)
            if held is None:
                raise registry.unknown_key_fault(key, "bindingKey")
            self._check_owner(held, publisher)
            save = changed.setdefault(held.key, _Save("service", held.element, held))
            save.element = _without_bindings(save.element, {key})
        await self._write(list(changed.values()), publisher)

    async def delete_tModel(self, asked: xml.XmlElement, publisher: registry.UddiPublisher) -> None:
        """It is hidden, not gone: whoever refers to it can still read what it meant."""
        for one in await self._owned("tmodel", asked, publisher):
            await self._registry.put(publisher, "tmodel", one.element, one, deleted=True)

    # What is one's own.

    async def get_registeredInfo(
        self, asked: xml.XmlElement, publisher: registry.UddiPublisher
    ) -> xml.XmlElement:
        wanted = asked.get("infoSelection")
        mine = f"writer = {registry.quoted(publisher.name)}"
        businesses = await self._registry.find("business", mine) if wanted != "hidden" else []
        models = [
            one
            for one in await self._registry.find("tmodel", mine)
            if wanted == "all" or one.deleted == (wanted == "hidden")
        ]
        return xml.XmlElement(
            U("registeredInfo"),
            inquiry.listed("businessInfos", await self._inquiry.business_infos(businesses)),
            inquiry.listed("tModelInfos", [inquiry.model_info(one) for one in models]),
        )

    # Assertions.

    async def _own_assertions(self, publisher: registry.UddiPublisher) -> list[registry.PublisherAssertion]:
        return await self._registry.assertions(f"writer = {registry.quoted(publisher.name)}")

    async def _asserted(
        self, asked: xml.XmlElement, publisher: registry.UddiPublisher
    ) -> list[registry.PublisherAssertion]:
        """What is to be said, each by somebody who owns one of its businesses."""
        said = [
            registry.PublisherAssertion(publisher.name, one) for one in asked.all(U("publisherAssertion"))
        ]
        owner = await inquiry.owners(
            self._registry, [key for one in said for key in (one.source, one.target)]
        )
        for one in said:
            for key in (one.source, one.target):
                if key not in owner:
                    raise registry.unknown_key_fault(key, "businessKey")
            if publisher.name not in (owner[one.source], owner[one.target]):
                raise faults.fault(
                    faults.UddiErrorCode.USER_MISMATCH,
                    f"neither {one.source} nor {one.target} is {publisher.name}'s",
                )
        return said

    async def add_publisherAssertions(self, asked: xml.XmlElement, publisher: registry.UddiPublisher) -> None:
        for one in await self._asserted(asked, publisher):
            await self._registry.say(publisher, one)

    async def set_publisherAssertions(
        self, asked: xml.XmlElement, publisher: registry.UddiPublisher
    ) -> xml.XmlElement:
        said = await self._asserted(asked, publisher)
        wanted = {one.identity for one in said}
        for one in said:
            await self._registry.say(publisher, one)
        for one in await self._own_assertions(publisher):
            if one.identity not in wanted:
                await self._registry.withdraw(publisher, one)
        return xml.XmlElement(U("publisherAssertions"), *(one.element for one in said))

    async def delete_publisherAssertions(
        self, asked: xml.XmlElement, publisher: registry.UddiPublisher
    ) -> None:
        said = [
            registry.PublisherAssertion(publisher.name, one) for one in asked.all(U("publisherAssertion"))
        ]
        there = {one.identity for one in await self._own_assertions(publisher)}
        if any(one.identity not in there for one in said):
            raise faults.fault(
                faults.UddiErrorCode.ASSERTION_NOT_FOUND, f"{publisher.name} has made no such assertion"
            )
        for one in said:
            await self._registry.withdraw(publisher, one)

    async def get_publisherAssertions(
        self, asked: xml.XmlElement, publisher: registry.UddiPublisher
    ) -> xml.XmlElement:
        del asked
        said = await self._own_assertions(publisher)
        return xml.XmlElement(U("publisherAssertionsResponse"), *(one.element for one in said))

    async def get_assertionStatusReport(
        self, asked: xml.XmlElement, publisher: registry.UddiPublisher
    ) -> xml.XmlElement:
        wanted = asked.text_of(U("completionStatus"))
        said = await self._registry.assertions()
        owner = await inquiry.owners(
            self._registry, [key for one in said for key in (one.source, one.target)]
        )
        makers: dict[tuple[str, str, entities.KeyedReference], set[str]] = {}
        first: dict[tuple[str, str, entities.KeyedReference], registry.PublisherAssertion] = {}
        for one in said:
            if publisher.name in (owner.get(one.source), owner.get(one.target)):
                makers.setdefault(one.identity, set()).add(one.publisher)
                first.setdefault(one.identity, one)
        items = []
        for identity, one in first.items():
            sides = {side: owner.get(key) for side, key in (("fromKey", one.source), ("toKey", one.target))}
            missing = [side for side, who in sides.items() if who not in makers[identity]]
            status = f"status:{missing[0]}_incomplete" if missing else "status:complete"
            if wanted and wanted != status:
                continue
            mine = [
                xml.XmlElement(U(side), key)
                for side, key in (("fromKey", one.source), ("toKey", one.target))
                if sides[side] == publisher.name
            ]
            items.append(
                xml.XmlElement(
                    U("assertionStatusItem"),
                    xml.XmlElement(U("fromKey"), one.source),
                    xml.XmlElement(U("toKey"), one.target),
                    one.keyed,
                    xml.XmlElement(U("keysOwned"), *mine),
                    attributes={"completionStatus": status},
                )
            )
        return xml.XmlElement(U("assertionStatusReport"), *items)


def _with_bindings(service: xml.XmlElement, bindings: Sequence[xml.XmlElement]) -> xml.XmlElement:
    return entities.with_part(
        service, "name description bindingTemplates", inquiry.listed("bindingTemplates", bindings)
    )


def _shown(binding: xml.XmlElement, save: _Save) -> xml.XmlElement:
    """As it was saved: an entry saved without UDDI numbers its bindings."""
    if save.entry is None:
        return binding
    access = entities.texts(binding, "accessPoint")
    there = [one for one in entities.bindings(save.element) if entities.texts(one, "accessPoint") == access]
    return there[-1]


def _without_bindings(service: xml.XmlElement, gone: set[str]) -> xml.XmlElement:
    return _with_bindings(
        service, [one for one in entities.bindings(service) if one.get("bindingKey") not in gone]
    )


def _says_generator(model: xml.XmlElement) -> bool:
    return any(
        one.model == standard_tmodels.TYPES and one.value.lower() == "keygenerator"
        for one in entities.bag(model).references
    )

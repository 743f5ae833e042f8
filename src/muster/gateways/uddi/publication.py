"""The publication API: saving, deleting, and assertions about businesses.

A save is validated completely before the first write: keys, owners, parents.  Then the entities are written
one after the other, children first, each with compare-and-set on the validated version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from muster.core.formats import xml
from muster.gateways.uddi import inquiry, plain_entries, records, registry
from muster.gateways.uddi.model import entities, faults, keys, schema, standard_tmodels
from muster.inform import service_entries

U = schema.UDDI
_REFERRING = {"address", "hostingRedirector", "keyedReference", "keyedReferenceGroup", "tModelInstanceInfo"}
_KEYS = {
    U("businessEntity"): "businessKey",
    U("businessService"): "serviceKey",
    U("bindingTemplate"): "bindingKey",
    U("tModel"): "tModelKey",
}


@dataclass(slots=True)
class _Save:
    """An entity to save."""

    kind: str
    element: xml.XmlElement
    before: records.UddiRecord | None
    entry: service_entries.ServiceEntry | None = None  # for an entry that was saved without UDDI


class PublicationHandler:
    def __init__(
        self,
        uddi_registry: registry.UddiRegistry,
        inquiry_handler: inquiry.InquiryHandler,
        new_key: Callable[[], str] = keys.new_key,
    ) -> None:
        self._registry = uddi_registry
        self._inquiry = inquiry_handler
        self._new_key = new_key

    # Saving.

    async def save_business(
        self, request: xml.XmlElement, publisher: registry.UddiPublisher
    ) -> xml.XmlElement:
        planned: list[_Save] = []
        business_keys: list[str] = []
        for element in request.all(U("businessEntity")):
            business = await self._plan_save("business", element, publisher, planned)
            key = business.element.get("businessKey") or ""
            shown: list[xml.XmlElement] = []
            for service in entities.services(element):
                other = service.get("businessKey")
                if other and other != key:
                    shown.append(await self._projection(service))
                    continue
                await self._plan_service(
                    entities.with_attributes(service, businessKey=key), publisher, planned
                )
            business_keys.append(key)
            business.element = entities.with_part(
                business.element,
                "discoveryURLs name description contacts businessServices",
                inquiry.listed("businessServices", shown),
            )
        # Of all businesses: a service may move from one to another.
        kept = {save.element.get("serviceKey") for save in planned if save.kind == "service"}
        gone = [
            record
            for key in business_keys
            for record in await self._registry.services_of(key)
            if record.key not in kept
        ]
        await self._write(planned, publisher)
        for record in gone:
            await self._registry.delete(publisher, record)
        return await self._inquiry.business_detail(business_keys)

    async def _projection(self, service: xml.XmlElement) -> xml.XmlElement:
        """The keys of a service of another business that is only shown here. It must exist, and is not
        changed.
        """
        record = await self._registry.get("service", service.get("serviceKey") or "")
        if record is None or record.business != service.get("businessKey"):
            raise faults.fault(
                faults.UddiErrorCode.INVALID_PROJECTION,
                f"{service.get('serviceKey')!r} is not a service of {service.get('businessKey')!r}",
            )
        projected = {"serviceKey": record.key, "businessKey": record.business}
        return xml.XmlElement(U("businessService"), attributes=projected)

    async def save_service(
        self, request: xml.XmlElement, publisher: registry.UddiPublisher
    ) -> xml.XmlElement:
        planned: list[_Save] = []
        for element in request.all(U("businessService")):
            await self._plan_service(element, publisher, planned)
        await self._write(planned, publisher)
        return xml.XmlElement(
            U("serviceDetail"), *(save.element for save in planned if save.kind == "service")
        )

    async def save_binding(
        self, request: xml.XmlElement, publisher: registry.UddiPublisher
    ) -> xml.XmlElement:
        changed: dict[str, _Save] = {}
        saved: list[xml.XmlElement] = []
        taken: set[str] = set()
        for element in request.all(U("bindingTemplate")):
            service_key = element.get("serviceKey") or ""
            binding_key = element.get("bindingKey") or ""
            there = await self._registry.service_with_binding(binding_key) if binding_key else None
            service_key = service_key or (there.key if there is not None else "")
            save = changed.get(service_key)
            if save is None:
                record = await self._registry.get("service", service_key)
                if record is None:
                    raise registry.unknown_key_fault(service_key, "serviceKey")
                self._check_owner(record, publisher)
                save = changed[service_key] = _Save("service", record.element, record)
            if there is not None and there.key != service_key:  # it moves to another service
                self._check_owner(there, publisher)
                left = changed.setdefault(there.key, _Save("service", there.element, there))
                left.element = _without_bindings(left.element, {binding_key})
            elif there is None and binding_key:
                await self._check_proposed(binding_key, "bindingKey", publisher, [])
            (made,) = self._bindings([element], service_key, taken)
            saved.append(made)
            rest = [
                binding
                for binding in entities.bindings(save.element)
                if binding.get("bindingKey") != made.get("bindingKey")
            ]
            save.element = _with_bindings(save.element, [*rest, made])
        await self._write(list(changed.values()), publisher)
        shown = [_shown(binding, changed[binding.get("serviceKey") or ""]) for binding in saved]
        return xml.XmlElement(U("bindingDetail"), *shown)

    async def save_tModel(self, request: xml.XmlElement, publisher: registry.UddiPublisher) -> xml.XmlElement:
        planned: list[_Save] = []
        for element in request.all(U("tModel")):
            save = await self._plan_save(
                "tmodel", entities.with_attributes(element, deleted=""), publisher, planned
            )
            key = save.element.get("tModelKey") or ""
            if keys.is_generator(key) != _is_marked_generator(save.element):
                raise faults.fault(
                    faults.UddiErrorCode.VALUE_NOT_ALLOWED,
                    f"{key}: the category bag of a key generator has keyGenerator under "
                    f"{standard_tmodels.TYPES}, and its key ends with :{keys.GENERATOR}",
                )
        await self._write(planned, publisher)
        return xml.XmlElement(U("tModelDetail"), *(planned_save.element for planned_save in planned))

    async def _plan_service(
        self, service: xml.XmlElement, publisher: registry.UddiPublisher, planned: list[_Save]
    ) -> None:
        taken = {
            binding.get("bindingKey") or ""
            for other in planned
            for binding in entities.bindings(other.element)
        }
        save = await self._plan_save("service", service, publisher, planned)
        business = service.get("businessKey") or (save.before.business if save.before is not None else "")
        business = business or records.DOMAIN_KEY
        if not any(
            other.kind == "business" and other.element.get("businessKey") == business for other in planned
        ):
            parent = await self._registry.get("business", business)
            if parent is None:
                raise registry.unknown_key_fault(business, "businessKey")
            if business != records.DOMAIN_KEY:
                self._check_owner(parent, publisher)
        key = save.element.get("serviceKey") or ""
        bindings = entities.bindings(service)
        for binding in bindings:
            proposed = binding.get("bindingKey")
            if not proposed:
                continue
            there = await self._registry.service_with_binding(proposed)
            if there is None:
                await self._check_proposed(proposed, "bindingKey", publisher, planned)
            elif there.key != key:
                self._check_owner(there, publisher)
                raise faults.fault(
                    faults.UddiErrorCode.INVALID_KEY_PASSED,
                    f"{proposed} belongs to another service",
                    key_type="bindingKey",
                )
        element = entities.with_attributes(save.element, businessKey=business)
        save.element = _with_bindings(element, self._bindings(bindings, key, taken))

    def _bindings(
        self, elements: Sequence[xml.XmlElement], service: str, taken: set[str]
    ) -> list[xml.XmlElement]:
        made = []
        for element in elements:
            key = element.get("bindingKey") or self._new_key()
            if key in taken:
                raise faults.fault(
                    faults.UddiErrorCode.INVALID_KEY_PASSED,
                    f"{key} occurs twice",
                    key_type="bindingKey",
                )
            taken.add(key)
            _check_signed(element)
            made.append(entities.with_attributes(element, bindingKey=key, serviceKey=service))
        return made

    async def _plan_save(
        self, kind: str, element: xml.XmlElement, publisher: registry.UddiPublisher, planned: list[_Save]
    ) -> _Save:
        """Plan to save an entity under its own key or a new one."""
        name = records.key_name(kind)
        key = element.get(name) or ""
        _check_signed(element)
        if key and any(other.kind == kind and other.element.get(name) == key for other in planned):
            raise faults.fault(faults.UddiErrorCode.INVALID_KEY_PASSED, f"{key} occurs twice", key_type=name)
        before = await self._registry.get(kind, key) if key else None
        if before is not None:
            self._check_owner(before, publisher)
        elif key:
            await self._check_proposed(key, name, publisher, planned)
        save = _Save(kind, entities.with_attributes(element, **{name: key or self._new_key()}), before)
        planned.append(save)
        return save

    def _check_owner(self, record: records.UddiRecord, publisher: registry.UddiPublisher) -> None:
        if record.owner != publisher.name:
            raise faults.fault(
                faults.UddiErrorCode.USER_MISMATCH, f"{record.key} is not owned by {publisher.name}"
            )

    async def _check_proposed(
        self, key: str, key_type: str, publisher: registry.UddiPublisher, planned: Sequence[_Save]
    ) -> None:
        keys.check(key, key_type)
        owner: dict[str, str | None] = {
            save.element.get("tModelKey") or "": publisher.name for save in planned if save.kind == "tmodel"
        }
        generator = keys.generator_of(key)
        while generator is not None:
            if generator not in owner:
                record = await self._registry.get("tmodel", generator)
                owner[generator] = None if record is None or record.deleted else record.owner
            generator = keys.generator_of(generator.rpartition(":")[0])
        if not keys.may_propose(key, publisher.name, owner.get):
            raise faults.fault(
                faults.UddiErrorCode.KEY_UNAVAILABLE,
                f"{publisher.name} may not use {key}: it does not own the key generator",
                key_type=key_type,
            )

    async def _write(self, planned: Sequence[_Save], publisher: registry.UddiPublisher) -> None:
        order = {"service": 0, "tmodel": 1, "business": 2}
        await self._check_references(planned)
        for save in planned:
            records.check(save.kind, save.element)
            if save.before is not None and save.before.entry is not None:
                save.entry = plain_entries.edited(save.before.entry, save.element)
        for save in sorted(planned, key=lambda other: order[other.kind]):
            await self._registry.put(publisher, save.kind, save.element, save.before, entry=save.entry)
            if save.entry is not None:
                save.element = records.from_entry(save.entry)

    async def _check_references(self, planned: Sequence[_Save]) -> None:
        """What a saved entity refers to exists, or is saved with it, or was referred to before."""
        known = {save.element.get(records.key_name(save.kind)) for save in planned}
        known |= {
            binding.get("bindingKey") for save in planned for binding in entities.bindings(save.element)
        }
        referred: set[tuple[str, str]] = set()
        for save in planned:
            before = set(_references(save.before.element)) if save.before is not None else set()
            referred |= {each for each in _references(save.element) if each[1] not in known} - before
        if len(referred) > inquiry.KEYS_MAX:
            raise faults.fault(
                faults.UddiErrorCode.TOO_MANY_OPTIONS,
                f"{len(referred)} other entities are referred to: the maximum is {inquiry.KEYS_MAX}",
            )
        await self._registry.get_all("tmodel", sorted(key for kind, key in referred if kind == "tModelKey"))
        for key in sorted(key for kind, key in referred if kind == "bindingKey"):
            if await self._registry.service_with_binding(key) is None:
                raise registry.unknown_key_fault(key, "bindingKey")

    # Deleting.

    async def _owned(
        self, kind: str, request: xml.XmlElement, publisher: registry.UddiPublisher
    ) -> list[records.UddiRecord]:
        owned = await self._registry.get_all(kind, inquiry.keys_of(request, records.key_name(kind)))
        for record in owned:
            self._check_owner(record, publisher)
        return owned

    async def delete_business(self, request: xml.XmlElement, publisher: registry.UddiPublisher) -> None:
        for business in await self._owned("business", request, publisher):
            for service in await self._registry.services_of(business.key):
                await self._registry.delete(publisher, service)
            for assertion in await self._own_assertions(publisher):
                if business.key in (assertion.source, assertion.target):
                    await self._registry.delete_assertion(publisher, assertion)
            await self._registry.delete(publisher, business)

    async def delete_service(self, request: xml.XmlElement, publisher: registry.UddiPublisher) -> None:
        for service in await self._owned("service", request, publisher):
            await self._registry.delete(publisher, service)

    async def delete_binding(self, request: xml.XmlElement, publisher: registry.UddiPublisher) -> None:
        changed: dict[str, _Save] = {}
        for key in inquiry.keys_of(request, "bindingKey"):
            record = await self._registry.service_with_binding(key)
            if record is None:
                raise registry.unknown_key_fault(key, "bindingKey")
            self._check_owner(record, publisher)
            save = changed.setdefault(record.key, _Save("service", record.element, record))
            save.element = _without_bindings(save.element, {key})
        await self._write(list(changed.values()), publisher)

    async def delete_tModel(self, request: xml.XmlElement, publisher: registry.UddiPublisher) -> None:
        """Hide a tModel: it can still be read by its key."""
        for model in await self._owned("tmodel", request, publisher):
            await self._registry.put(publisher, "tmodel", model.element, model, deleted=True)

    # Own entities.

    async def get_registeredInfo(
        self, request: xml.XmlElement, publisher: registry.UddiPublisher
    ) -> xml.XmlElement:
        selection = request.get("infoSelection")
        mine = f"writer = {registry.quoted(publisher.name)}"
        businesses = await self._registry.find("business", mine) if selection != "hidden" else []
        models = [
            model
            for model in await self._registry.find("tmodel", mine)
            if selection == "all" or model.deleted == (selection == "hidden")
        ]
        return xml.XmlElement(
            U("registeredInfo"),
            inquiry.listed("businessInfos", await self._inquiry.business_infos(businesses)),
            inquiry.listed("tModelInfos", [inquiry.model_info(model) for model in models]),
        )

    # Assertions.

    async def _own_assertions(self, publisher: registry.UddiPublisher) -> list[registry.PublisherAssertion]:
        return await self._registry.assertions(f"writer = {registry.quoted(publisher.name)}")

    async def _requested_assertions(
        self, request: xml.XmlElement, publisher: registry.UddiPublisher
    ) -> list[registry.PublisherAssertion]:
        """The assertions of a request; the publisher must own one of the businesses of each."""
        assertions = [
            registry.PublisherAssertion(publisher.name, element)
            for element in request.all(U("publisherAssertion"))
        ]
        owner = await inquiry.owners(
            self._registry, [key for assertion in assertions for key in (assertion.source, assertion.target)]
        )
        await self._registry.get_all("tmodel", sorted({each.reference.model for each in assertions}))
        for assertion in assertions:
            for key in (assertion.source, assertion.target):
                if key not in owner:
                    raise registry.unknown_key_fault(key, "businessKey")
            if publisher.name not in (owner[assertion.source], owner[assertion.target]):
                raise faults.fault(
                    faults.UddiErrorCode.USER_MISMATCH,
                    f"{publisher.name} owns neither {assertion.source} nor {assertion.target}",
                )
        return assertions

    async def add_publisherAssertions(
        self, request: xml.XmlElement, publisher: registry.UddiPublisher
    ) -> None:
        for assertion in await self._requested_assertions(request, publisher):
            await self._registry.put_assertion(publisher, assertion)

    async def set_publisherAssertions(
        self, request: xml.XmlElement, publisher: registry.UddiPublisher
    ) -> xml.XmlElement:
        assertions = await self._requested_assertions(request, publisher)
        identities = {assertion.identity for assertion in assertions}
        for assertion in assertions:
            await self._registry.put_assertion(publisher, assertion)
        for assertion in await self._own_assertions(publisher):
            if assertion.identity not in identities:
                await self._registry.delete_assertion(publisher, assertion)
        return xml.XmlElement(U("publisherAssertions"), *(assertion.element for assertion in assertions))

    async def delete_publisherAssertions(
        self, request: xml.XmlElement, publisher: registry.UddiPublisher
    ) -> None:
        assertions = [
            registry.PublisherAssertion(publisher.name, element)
            for element in request.all(U("publisherAssertion"))
        ]
        there = {assertion.identity for assertion in await self._own_assertions(publisher)}
        if any(assertion.identity not in there for assertion in assertions):
            raise faults.fault(
                faults.UddiErrorCode.ASSERTION_NOT_FOUND, f"{publisher.name} has not made this assertion"
            )
        for assertion in assertions:
            await self._registry.delete_assertion(publisher, assertion)

    async def get_publisherAssertions(
        self, request: xml.XmlElement, publisher: registry.UddiPublisher
    ) -> xml.XmlElement:
        del request
        assertions = await self._own_assertions(publisher)
        return xml.XmlElement(
            U("publisherAssertionsResponse"), *(assertion.element for assertion in assertions)
        )

    async def get_assertionStatusReport(
        self, request: xml.XmlElement, publisher: registry.UddiPublisher
    ) -> xml.XmlElement:
        selection = request.text_of(U("completionStatus"))
        assertions = await self._registry.assertions()
        owner = await inquiry.owners(
            self._registry, [key for assertion in assertions for key in (assertion.source, assertion.target)]
        )
        makers: dict[tuple[str, str, entities.KeyedReference], set[str]] = {}
        first: dict[tuple[str, str, entities.KeyedReference], registry.PublisherAssertion] = {}
        for assertion in assertions:
            if publisher.name in (owner.get(assertion.source), owner.get(assertion.target)):
                makers.setdefault(assertion.identity, set()).add(assertion.publisher)
                first.setdefault(assertion.identity, assertion)
        items = []
        for identity, assertion in first.items():
            sides = {
                side: owner.get(key)
                for side, key in (("fromKey", assertion.source), ("toKey", assertion.target))
            }
            missing = [side for side, who in sides.items() if who not in makers[identity]]
            status = f"status:{missing[0]}_incomplete" if missing else "status:complete"
            if selection and selection != status:
                continue
            mine = [
                xml.XmlElement(U(side), key)
                for side, key in (("fromKey", assertion.source), ("toKey", assertion.target))
                if sides[side] == publisher.name
            ]
            items.append(
                xml.XmlElement(
                    U("assertionStatusItem"),
                    xml.XmlElement(U("fromKey"), assertion.source),
                    xml.XmlElement(U("toKey"), assertion.target),
                    assertion.keyed,
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
    """The binding as saved: an entry saved without UDDI numbers its bindings."""
    if save.entry is None:
        return binding
    access = entities.texts(binding, "accessPoint")
    there = [
        other for other in entities.bindings(save.element) if entities.texts(other, "accessPoint") == access
    ]
    return there[-1]


def _without_bindings(service: xml.XmlElement, gone: set[str]) -> xml.XmlElement:
    return _with_bindings(
        service, [binding for binding in entities.bindings(service) if binding.get("bindingKey") not in gone]
    )


def _check_signed(element: xml.XmlElement) -> None:
    """A key that the registry adds would make the signature invalid."""
    if not entities.is_signed(element):
        return
    for part in element.walk():
        name = _KEYS.get(part.name)
        if name is not None and not part.get(name):
            raise faults.fault(
                faults.UddiErrorCode.VALUE_NOT_ALLOWED, f"a signed {part.local} must have a {name}"
            )


def _references(element: xml.XmlElement) -> Iterator[tuple[str, str]]:
    """The kinds and keys of what an entity refers to."""
    for part in element.walk():
        if part.name == U("accessPoint") and part.get("useType") == "bindingTemplate":
            yield "bindingKey", part.text.lower()
        elif part.local in _REFERRING and part.namespace == U:
            kind = "bindingKey" if part.local == "hostingRedirector" else "tModelKey"
            if key := part.get(kind):
                yield kind, key
            elif part.local != "address":
                raise registry.unknown_key_fault("", kind)


def _is_marked_generator(model: xml.XmlElement) -> bool:
    return any(
        reference.model == standard_tmodels.TYPES and reference.value.lower() == "keygenerator"
        for reference in entities.bag(model).references
    )

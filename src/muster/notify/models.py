"""Models of receivers and events, and the vocabulary that all models of a domain form.

A *model* declares typed attributes.  A receiver's state is an instance of a model; so is the content of an
event, whose model has the name of the event's type.  Names that begin with an underscore are *restricted*: a
model may declare them, so that policies are type-checked, but only an authority can assign them a value.

A condition is checked when it is registered.  A policy refers to events and, under ``sender.``, to senders,
so it is checked against the attributes of all events and senders.  An address must fit at least one receiver
model. Two models may declare one name with different types; then only a condition that is invalid for each of
them is rejected.

In a policy the types of events and the names of their content stand beside each other.  So no attribute of
content has the name of a type: otherwise the sender of one type could fake another.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from muster.core import errors
from muster.notify.matcher import policy_cache
from muster.predicates import ast, limits, types
from muster.predicates.analysis import cost, normal_forms, type_check
from muster.predicates.syntax import parser, printer

ATTRIBUTES_MAX: Final = 256
MODELS_MAX: Final = 1_000  # of receivers, and of events: each event is compared with all of them
CONJUNCTIONS_MAX: Final = 64
REMEMBERED_MAX: Final = 32 << 20  # bytes: each shard may have all policies, and each gets its own request
REFUSED_MAX: Final = 256  # policies that were refused lately: one is checked twice
JUST_CHECKED_MAX: Final = 2_000  # trees take twenty times the memory of their text
EVENT_BYTES_MAX: Final = 256 << 10  # leaves space for the names of its receivers

# Policies stay in memory and are evaluated for every event, so the limits are lower than for a search.
POLICY_LIMITS: Final = limits.PredicateLimits(text_length=16_384, clauses=256)
# For the canonical form, which may be longer than the text that was within the limits above.
KEPT_LIMITS: Final = limits.PredicateLimits(
    text_length=1 << 20, clauses=10_000, depth=100, pattern_length=1024, gaps_length=1 << 20
)

# Known for every sender, from the subject that the broker checked. No model declares them, no grant assigns
# them.
RESERVED: Final = frozenset({"_process", "_id"})
IDENTITY: Final = {"sender._process": types.STRING, "sender._id": types.STRING}

_just_checked: Final[dict[str, ast.Condition]] = {}  # by canonical text: often needed right after the check

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}\Z")

State = Mapping[str, types.Value]


class ModelKind(enum.Enum):
    RECEIVER = "receiver"
    EVENT = "event"


class RestrictedAttributeClaimed(errors.Forbidden):
    """A receiver set a restricted attribute, which only an authority can grant."""

    code = "restricted-claim"


def restricted(name: str) -> bool:
    return name.startswith("_")


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    attributes: Mapping[str, types.AttributeType] = field(hash=False)
    kind: ModelKind = ModelKind.RECEIVER

    def __post_init__(self) -> None:
        if len(self.attributes) > ATTRIBUTES_MAX:
            raise errors.LimitExceeded(f"a model has at most {ATTRIBUTES_MAX} attributes")
        for name in (self.name, *self.attributes):
            require_name(name)
        if self.kind is ModelKind.EVENT and any(map(restricted, self.attributes)):
            raise errors.InvalidInput(
                f"the event {self.name} has a restricted attribute: no authority grants the content of events"
            )
        for name, declared in self.attributes.items():
            if declared.kind is types.ValueKind.SET and len(declared.domain) > 63:
                raise errors.LimitExceeded(f"the domain of {name} has more than 63 words")

    def require(self, state: State) -> dict[str, types.Value]:
        """Return ``state`` with converted numbers and without NULLs, if it fits the model."""
        values: dict[str, types.Value] = {}
        for name, value in state.items():
            if restricted(name):
                raise RestrictedAttributeClaimed(
                    f"{name} is restricted: only an authority can grant it",
                    hint="request a grant from an authority (muster authority grant)",
                )
            values[name] = _fitting(self._accepting(name, value), value)
        return values

    def require_granted(self, values: State) -> None:
        """Check restricted attributes, which an authority is to grant."""
        for name, value in values.items():
            self._accepting(name, value)

    def _accepting(self, name: str, value: types.Value) -> types.AttributeType:
        """The type of an attribute, which accepts this value."""
        declared = self.attributes.get(name)
        if declared is None:
            raise errors.InvalidInput(
                f"{self.name} has no attribute {name[:80]}",
                hint=type_check.closest_name(name, self.attributes)
                or f"the attributes are {', '.join(sorted(self.attributes)[:20])}",
            )
        require_encodable(name, value)
        if not declared.accepts(value):
            raise errors.InvalidInput(f"{name} must be of type {declared}, not {value!r:.80}")
        return declared


def require_name(name: str) -> None:
    """Check the name of a model or an attribute."""
    if not _NAME.match(name):
        raise errors.InvalidInput(
            f"{name[:80]!r} is not a valid name: use a letter, then letters, digits and _"
        )


def require_finite(name: str, values: Collection[object]) -> None:
    # JSON turns infinity into NULL, MessagePack does not: two notifiers could decide differently.
    if math.inf in values or -math.inf in values:
        raise errors.InvalidInput(f"{name} is not finite", hint="use a large number, or leave it out")


def require_encodable(name: str, value: types.Value) -> None:
    """Check a number that is stored or sent: integers have 64 bits, floats are finite."""
    if value.__class__ is int and not types.INT_MIN <= value <= types.INT_MAX:
        raise errors.InvalidInput(f"{name} is an integer of more than 64 bits")
    if value.__class__ is float:
        require_finite(name, (value,))


def _fitting(declared: types.AttributeType, value: types.Value) -> types.Value:
    if types.is_null(value):
        return None
    if declared.kind is types.ValueKind.FLOAT:
        return float(value)  # type: ignore[arg-type]
    if declared.kind is types.ValueKind.SET:
        return frozenset(value)  # type: ignore[arg-type]
    return value


class Vocabulary:
    """All models of a domain."""

    def __init__(self) -> None:
        self.receivers: dict[str, Model] = {}
        self.events: dict[str, Model] = {}
        self._policies: list[types.Model] | None = None
        self._checked = policy_cache.PolicyCache()
        self._refused: dict[str, errors.MusterError] = {}

    def add(self, model: Model) -> None:
        self.require_growth(model)
        self.of_kind(model.kind)[model.name] = model
        self._policies = None
        self.forget()

    def require_growth(self, model: Model) -> None:
        """`errors.Conflict` unless it is equal to or extends the known model of that name."""
        held = self.of_kind(model.kind).get(model.name)
        if held is not None:
            for name, declared in held.attributes.items():
                if model.attributes.get(name) != declared:
                    raise errors.Conflict(
                        f"{model.name} has {name} as {declared}: a model can only be extended",
                        hint="give the changed model another name",
                    )

    def require_distinct(self, model: Model) -> None:
        """Check that what a model adds has no name with another meaning."""
        held = self.of_kind(model.kind).get(model.name)
        added = model.attributes.keys() - (held.attributes.keys() if held else ())
        if reserved := added & RESERVED:
            raise errors.InvalidInput(f"{min(reserved)} is reserved for the identity that the broker proved")
        if model.kind is ModelKind.EVENT:
            taken = added & {model.name, *self.events}
            users = [event.name for event in self.events.values() if model.name in event.attributes]
            if taken or (held is None and users):
                name, what = (min(taken), "type") if taken else (model.name, f"attribute of {min(users)}")
                raise errors.Conflict(
                    f"{name} is already the name of an event {what}: a policy could not tell them apart",
                    hint="give one of them another name",
                )

    def of_kind(self, kind: ModelKind) -> dict[str, Model]:
        return self.receivers if kind is ModelKind.RECEIVER else self.events

    def receiver_model(self, name: str) -> Model:
        if name not in self.receivers:
            raise errors.NotFound(
                f"there is no model {name[:80]}",
                hint=type_check.closest_name(name, self.receivers) or "define it first",
            )
        return self.receivers[name]

    def policy(self, text: str) -> ast.Condition:
        """Parse and check a policy; `errors.ParseError` with the position, `errors.LimitExceeded` by cost."""
        condition = parser.parse(text, home="event", scopes=("event", "sender"), bounds=POLICY_LIMITS)
        _require(condition, self.policy_models(), text)
        return condition

    def policy_text(self, text: str) -> str:
        """Check a policy and return its canonical form; an empty policy stays empty."""
        if not text:
            return ""
        kept = self._checked.get(text)
        if kept is None:
            if (known := self._refused.get(text)) is not None:
                raise known.with_traceback(None)
            try:
                condition = normal_forms.canonical(self.policy(text))
            except errors.MusterError as error:
                if len(self._refused) >= REFUSED_MAX:
                    self._refused.clear()
                self._refused[text] = error
                raise
            kept = printer.write(condition)
            if len(_just_checked) >= JUST_CHECKED_MAX:
                _just_checked.clear()
            _just_checked[kept] = condition
            if self._checked.bytes > REMEMBERED_MAX:
                self.forget()
            self._checked.add(text, kept)
        return kept

    def is_checked(self, text: str) -> bool:
        return not text or text in self._refused or self._checked.get(text) is not None

    def forget(self) -> None:
        """Drop the cache of checked policies: useful while many receivers join, and large afterwards."""
        self._checked.forget()
        self._refused.clear()
        _just_checked.clear()

    def address(self, text: str) -> ast.Condition:
        condition = parser.parse(text, home="receiver", scopes=("receiver",), bounds=POLICY_LIMITS)
        rejected: list[tuple[type_check.TypeProblem, ...]] = []
        for model in self.receivers.values():
            if not (problems := type_check.check(condition, model.attributes)):
                return condition
            rejected.append(problems)
        if rejected or ast.names(condition):
            best = min(rejected, key=len, default=()) or type_check.check(condition, {})
            raise _fault(best[0], text)
        return condition

    def require_type(self, kind: str) -> None:
        """Reject a type that no model defines, if there are models of events: no policy can name it."""
        if self.events and kind not in self.events:
            types_ = sorted(self.events)
            hint = type_check.closest_name(kind, types_) or f"the types are {', '.join(types_[:10])}"
            raise errors.InvalidInput(f"no model defines events of the type {kind[:80]!r}", hint=hint)

    def event(self, kind: str, content: State) -> dict[str, types.Value]:
        """Check the content of an event; for a type without a model, any encodable values are accepted."""
        if not _NAME.match(kind) or restricted(kind):
            raise errors.InvalidInput(f"{kind[:80]!r} is not a valid type of events")
        if kind in self.events:
            content = self.events[kind].require(content)
        elif any(kind in event.attributes for event in self.events.values()):
            raise errors.InvalidInput(f"{kind} is the name of an attribute of events, not a type of events")
        for name, value in content.items():
            if name == kind or name in self.events:
                raise errors.InvalidInput(
                    f"{name} is a type of events: content cannot have an attribute of that name",
                    hint="give the attribute another name",
                )
            if not _NAME.match(name) or restricted(name):
                raise errors.InvalidInput(f"{name[:80]!r} is not a valid name of an attribute")
            require_encodable(name, value)
            if not types.is_null(value) and types.kind_of(value) is None:
                raise errors.InvalidInput(f"{name} has a value of an unsupported type: {value!r:.80}")
        return dict(content)

    def policy_models(self) -> list[types.Model]:
        """Return the attributes that a policy may use; several variants if models disagree about a type."""
        if self._policies is None:
            choices: dict[str, list[types.AttributeType]] = {key: [kind] for key, kind in IDENTITY.items()}
            for event in self.events.values():
                choices.setdefault(event.name, []).append(types.BOOL)
                for name, declared in event.attributes.items():
                    choices.setdefault(name, []).append(declared)
            for receiver in self.receivers.values():
                for name, declared in receiver.attributes.items():
                    choices.setdefault(f"sender.{name}", []).append(declared)
            distinct = {key: list(dict.fromkeys(declared_types)) for key, declared_types in choices.items()}
            # For a policy, sets of the same name are one: it may use any of their words.
            for key, declared_types in distinct.items():
                sets = [kind for kind in declared_types if kind.kind is types.ValueKind.SET]
                if len(sets) > 1:
                    words = dict.fromkeys(word for kind in sets for word in kind.domain)
                    joined = types.AttributeType(types.ValueKind.SET, tuple(words))
                    distinct[key] = [
                        *(kind for kind in declared_types if kind.kind is not types.ValueKind.SET),
                        joined,
                    ]
            variants = max(map(len, distinct.values()))
            self._policies = [
                {
                    key: declared_types[variant % len(declared_types)]
                    for key, declared_types in distinct.items()
                }
                for variant in range(variants)
            ]
        return self._policies


def require_size(size: int) -> None:
    """Check the encoded size of an event."""
    if size > EVENT_BYTES_MAX:
        raise errors.LimitExceeded(f"an event of {size:,} bytes: at most {EVENT_BYTES_MAX:,} are allowed")


def pop_checked_policy(text: str) -> ast.Condition | None:
    """Remove and return the tree of a canonical policy, if it was checked recently."""
    return _just_checked.pop(text, None)


def parse_policy(text: str) -> ast.Condition:
    """Parse a policy that was checked before."""
    return parser.parse(text, home="event", scopes=("event", "sender"), bounds=KEPT_LIMITS)


def canonical_text(policy: ast.Condition) -> str:
    """Return the form in which a policy is stored; equal policies have equal text."""
    return printer.write(normal_forms.canonical(policy))


def cost_of(condition: ast.Condition) -> tuple[cost.Cost, int | None]:
    """Return its cost and its number of conjunctions; None: too many for the index."""
    try:
        parts: int | None = len(normal_forms.disjunctive_normal(condition, cap=CONJUNCTIONS_MAX))
    except errors.LimitExceeded:
        parts = None
    return cost.measure(condition), parts


def _require(condition: ast.Condition, models: list[types.Model], text: str) -> None:
    remaining: dict[ast.Span, type_check.TypeProblem] | None = None
    for variant in models:
        problems = {problem.span: problem for problem in type_check.check(condition, variant)}
        remaining = (
            problems if remaining is None else {at: remaining[at] for at in remaining if at in problems}
        )
        if not remaining:
            return
    if remaining:
        raise _fault(remaining[min(remaining)], text)


def _fault(problem: type_check.TypeProblem, text: str) -> errors.ParseError:
    return errors.ParseError(problem.message, text=text, position=problem.span[0], hint=problem.hint)

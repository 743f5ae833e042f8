"""Models, states and policies as documents: YAML, JSON, a readable notation and XML, with conversions.

The notation is that of the paper, with keywords for what the paper describes in its text:

    WebServer = { String application; int servicePort; DomainedSet{docs, cgi} services; float load }
    event alert = { int threat_level }
    state web-1 = WebServer { application = "IIS"; services = {docs, cgi}; load = 0.39 }
    policy web-1 = (alert AND threat_level >= 4) AND (sender: (_trust_level >= 2));

A state, typed values and a policy may also stand alone, as in the paper; `NotifyDocument.named` says whose
they are:

    WebServer = { application = "IIS"; load = 0.39 }
    Controller = { String _command_region = "northwest"; int _trust_level = 4 }
    { alert AND threat_level >= 4 } OR { command }

YAML and JSON have the same three lists under ``models``, ``states`` and ``policies``; XML follows
``docs/schemas/notify.xsd`` (`muster.notify.documents_xml`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from muster.core import errors, subjects
from muster.notify import models
from muster.predicates import types

SIZE_MAX: Final = 4 << 20
Form = Literal["yaml", "json", "notation", "xml"]

_TYPES: Final = {"string": "String", "int": "int", "float": "float", "bool": "bool"}
_TOKEN: Final = re.compile(
    r"""(?P<space>(?:\s|//[^\n]*)+)|(?P<string>"(?:[^"\\]|\\.)*")|(?P<mark>[{}=;,])|(?P<word>[^\s{}=;,"]+)"""
)
_EXPRESSION: Final = re.compile(r"""(?:[^;'"]|'[^']*'|"[^"]*")*""")
_PLAIN: Final = re.compile(r"[\w.-]+(?: [\w.-]+)*\Z")
_WHOLE: Final = re.compile(r"[+-]?\d+\Z")
_DIGITS_MAX: Final = 40
_REAL: Final = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?\Z")


@dataclass(frozen=True, slots=True)
class StateDocument:
    receiver: str  # empty: not named
    model: str
    values: Mapping[str, types.Value]

    @property
    def own(self) -> dict[str, types.Value]:
        return {name: held for name, held in self.values.items() if not models.restricted(name)}

    @property
    def granted(self) -> dict[str, types.Value]:
        """What only an authority can assign."""
        return {name: held for name, held in self.values.items() if models.restricted(name)}


@dataclass(frozen=True, slots=True)
class NotifyDocument:
    models: tuple[models.Model, ...] = ()
    states: tuple[StateDocument, ...] = ()
    policies: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (*(state.receiver for state in self.states), *self.policies):
            if name:
                subjects.token(name)
        known = {model.name: model for model in self.models if model.kind is models.ModelKind.RECEIVER}
        for state in self.states:
            for name, held in ((state.model, None), *state.values.items()):
                models.require_name(name)
                models.require_encodable(name, held)
            if state.model in known:
                known[state.model].require(state.own)
                known[state.model].require_granted(state.granted)

    def named(self, name: str) -> NotifyDocument:
        """The document with ``name`` for the receiver whose state or policy stands alone."""
        receivers = [state.receiver or name for state in self.states]
        policies = {receiver or name: text for receiver, text in self.policies.items()}
        if "" in (*receivers, *policies):
            raise errors.InvalidInput(
                "a state or a policy of the document does not say whose it is",
                hint="name the receiver with --as, or write `state NAME = MODEL {…}` and `policy NAME = …`",
            )
        for receiver in receivers:
            if receivers.count(receiver) > 1:
                raise errors.InvalidInput(f"the document has two states of {receiver!r}")
        if len(policies) < len(self.policies):
            raise errors.InvalidInput(f"the document has two policies of {name!r}")
        states = tuple(
            dataclasses.replace(state, receiver=receiver)
            for state, receiver in zip(self.states, receivers, strict=True)
        )
        return NotifyDocument(self.models, states, policies)


def value(text: str) -> types.Value:
    """Parse a value: 4, 0.39, true, {docs, cgi}, "IIS"; anything else is a string."""
    text = text.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _WHOLE.match(text):
        if len(text) > _DIGITS_MAX:
            raise errors.InvalidInput(f"{text[:40]}… is an integer of more than 64 bits")
        return int(text)
    if _REAL.match(text):
        return float(text)
    if text.startswith("{") and text.endswith("}"):
        inside = text[1:-1].strip()
        return frozenset(word.strip().strip('"') for word in inside.split(",")) if inside else frozenset()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        return _unquoted(text)
    return text


def _unquoted(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text[1:-1])


def format_value(value: types.Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, int | float):
        return repr(value)
    assert value is not None
    return _set(sorted(value))


def _set(words: Iterable[str]) -> str:
    listed = (word if _PLAIN.match(word) else format_value(word) for word in words)
    return f"{{{', '.join(listed)}}}"


# -- reading


def read(data: bytes) -> NotifyDocument:
    """Read a document in any of the formats, detected by its beginning."""
    if len(data) > SIZE_MAX:
        raise errors.LimitExceeded(f"a document of {len(data):,} bytes exceeds {SIZE_MAX:,}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise errors.InvalidInput(f"a document must be UTF-8 text: {error}") from None
    start = text.lstrip()
    if start.startswith("<"):
        from muster.notify import documents_xml

        return documents_xml.read(text)
    if re.match(r"(?://|(?:event|state|policy)\s+[\w.-]+\s*=|\w+\s*=|[({](?!\s*[\"}]))", start):
        return _Notation(text).document()
    return _plain(_loaded(text, is_json=start.startswith("{")))


def _loaded(text: str, *, is_json: bool) -> Any:
    if is_json:
        try:
            return msgspec.json.decode(text)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise errors.InvalidInput(f"invalid JSON: {str(error)[:200]}") from None
    import yaml

    from muster.core.formats import yaml as yaml_

    # Aliases let a small text expand to a large tree, and documents do not need them.
    with contextlib.suppress(yaml.YAMLError):  # reported below
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text, Loader=yaml_.loader())):
            raise errors.InvalidInput("aliases are not supported: write the value out")
    return yaml_.read(text, "the document")


class _Model(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    attributes: dict[str, str]
    of: Literal["receiver", "event"] = "receiver"


class _State(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    values: dict[str, str | bool | int | float | list[str] | None]
    receiver: str = ""


class _Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    models: list[_Model] = []
    states: list[_State] = []
    policies: dict[str, str] = {}


def _plain(tree: Any) -> NotifyDocument:
    try:
        document = msgspec.convert(tree or {}, _Document)
    except msgspec.ValidationError as error:
        raise errors.InvalidInput(f"not a document of models, states and policies: {error}") from None
    return NotifyDocument(
        tuple(_model(model.name, model.attributes, model.of) for model in document.models),
        tuple(
            StateDocument(
                state.receiver,
                state.model,
                {
                    name: frozenset(held) if isinstance(held, list) else held
                    for name, held in state.values.items()
                    if not types.is_null(held)
                },
            )
            for state in document.states
        ),
        {name: text.strip() for name, text in document.policies.items()},
    )


def _model(name: str, attributes: Mapping[str, str], of: str) -> models.Model:
    declared = {key: types.parse_type(text) for key, text in attributes.items()}
    return models.Model(name, declared, models.ModelKind(of))


class _Notation:
    """A parser of the readable notation."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def document(self) -> NotifyDocument:
        declared: list[models.Model] = []
        states: list[StateDocument] = []
        policies: dict[str, str] = {}
        while self._peek():
            if self._peek()[0] in "{(":
                if "" in policies:
                    raise self._fault("a second policy without a name")
                policies[""] = self._expression()
                if self._peek() == ";":
                    self._mark(";")
                continue
            word = self._take("word")
            if self._peek() == "=":  # also for a model with the name `policy`
                self._mark("=")
                attributes, values = self._attributes()
                if attributes or not values:
                    declared.append(_model(word, attributes, "receiver"))
                if values:
                    states.append(StateDocument("", word, values))
            elif word == "policy":
                name = self._take("word")
                self._mark("=")
                policies[name] = self._expression()
            elif word == "state":
                receiver = self._take("word")
                self._mark("=")
                kind = self._take("word")
                states.append(StateDocument(receiver, kind, self._values()))
            elif word == "event":
                name = self._take("word")
                self._mark("=")
                attributes, values = self._attributes()
                if values:
                    raise self._fault("the model of an event has no values")
                declared.append(_model(name, attributes, "event"))
            else:
                raise self._fault("expected =")
            if self._peek() == ";":
                self._mark(";")
        return NotifyDocument(tuple(declared), tuple(states), policies)

    def _attributes(self) -> tuple[dict[str, str], dict[str, types.Value]]:
        """Types, values, or types with values: {String application; int port = 80; load = 0.39}"""
        attributes: dict[str, str] = {}
        values: dict[str, types.Value] = {}
        self._mark("{")
        while self._peek() != "}":
            name = self._take("word")
            if self._peek() != "=":
                kind = name
                if self._peek() == "{":
                    words = self._set()
                    types.set_of(*words)  # rejects a word with a comma
                    kind += f"{{{', '.join(words)}}}"
                name = self._take("word")
                attributes[name] = kind
            if self._peek() == "=":
                self._mark("=")
                if self._peek() == "{":
                    values[name] = frozenset(self._set())
                elif self._peek().startswith('"'):
                    values[name] = _unquoted(self._take("string"))
                else:
                    values[name] = value(self._take("word"))
            if self._peek() != "}":
                self._mark(";")
        self._mark("}")
        if attributes and (others := values.keys() - attributes.keys()):
            raise self._fault(f"{min(others)} has no type, but other attributes have")
        return attributes, values

    def _values(self) -> dict[str, types.Value]:
        attributes, values = self._attributes()
        if attributes:
            raise self._fault("a state has values: NAME = VALUE")
        return values

    def _set(self) -> list[str]:
        """{docs, front page, "cgi"}"""
        self._mark("{")
        words: list[str] = []
        while self._peek() != "}":
            if self._peek().startswith('"'):
                words.append(_unquoted(self._take("string")))
            else:
                start = end = self._at
                while (token := self._next()) is not None and token.lastgroup == "word":
                    self._at = end = token.end()
                words.append(self._text[start:end])
            if self._peek() != "}":
                self._mark(",")
        self._mark("}")
        return words

    def _expression(self) -> str:
        """Read up to the semicolon, which occurs in predicates only inside strings."""
        match = _EXPRESSION.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        return match[0].strip()

    def _next(self) -> re.Match[str] | None:
        token = _TOKEN.match(self._text, self._at)
        if token is not None and token.lastgroup == "space":
            self._at = token.end()
            token = _TOKEN.match(self._text, self._at)
        if token is None and self._at < len(self._text):
            raise self._fault("unexpected text")
        return token

    def _peek(self) -> str:
        token = self._next()
        return token[0] if token else ""

    def _take(self, kind: str) -> str:
        token = self._next()
        if token is None or token.lastgroup != kind:
            raise self._fault(f"expected a {kind}")
        self._at = token.end()
        return token[0]

    def _mark(self, mark: str) -> None:
        if self._peek() != mark:
            raise self._fault(f"expected {mark}")
        self._take("mark")

    def _fault(self, message: str) -> errors.ParseError:
        return errors.ParseError(message, text=self._text, position=self._at)


# -- writing


def write(document: NotifyDocument, form: Form) -> str:
    return _WRITERS[form](document)


def _tree(document: NotifyDocument) -> dict[str, Any]:
    return {
        "models": [
            {
                "name": model.name,
                **({"of": "event"} if model.kind is models.ModelKind.EVENT else {}),
                "attributes": {name: str(declared) for name, declared in model.attributes.items()},
            }
            for model in document.models
        ],
        "states": [
            {
                **({"receiver": state.receiver} if state.receiver else {}),
                "model": state.model,
                "values": {
                    name: sorted(held) if isinstance(held, frozenset) else held
                    for name, held in state.values.items()
                    if not types.is_null(held)
                },
            }
            for state in document.states
        ],
        "policies": dict(document.policies),
    }


def _yaml(document: NotifyDocument) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: yaml.SafeDumper, held: str) -> yaml.ScalarNode:
        # YAML reads this character as a line break and returns a space, unless it is escaped.
        return dumper.represent_scalar("tag:yaml.org,2002:str", held, style='"' if "\x85" in held else None)

    Dumper.add_representer(str, text)
    made: str = yaml.dump(_tree(document), Dumper=Dumper, sort_keys=False, allow_unicode=True)
    return made


def _json(document: NotifyDocument) -> str:
    return msgspec.json.format(msgspec.json.encode(_tree(document)), indent=2).decode() + "\n"


def _notation(document: NotifyDocument) -> str:
    lines = []
    for model in document.models:
        event = "event " if model.kind is models.ModelKind.EVENT else ""
        inside = ";\n".join(f"  {_type(kind)} {name}" for name, kind in model.attributes.items())
        lines.append(f"{event}{model.name} = {{\n{inside}\n}}")
    for state in document.states:
        inside = ";\n".join(
            f"  {name} = {format_value(held)}"
            for name, held in state.values.items()
            if not types.is_null(held)
        )
        lead = f"state {state.receiver} = {state.model}" if state.receiver else f"{state.model} ="
        lines.append(f"{lead} {{\n{inside}\n}}")
    for name, text in document.policies.items():
        if not _EXPRESSION.fullmatch(text):
            raise errors.InvalidInput(
                f"the policy {name} cannot be written in this format: unpaired quote or semicolon",
                hint="use another format",
            )
        alone = text if text.startswith(("(", "{")) else f"({text})"
        lines.append(f"policy {name} = {text};" if name else f"{alone};")
    return "\n".join(lines) + "\n"


def _type(declared: types.AttributeType) -> str:
    if declared.kind is types.ValueKind.SET:
        return f"DomainedSet{_set(declared.domain)}"
    return _TYPES[declared.kind.value]


def _xml(document: NotifyDocument) -> str:
    from muster.notify import documents_xml

    return documents_xml.write(document)


_WRITERS: Final[dict[str, Callable[[NotifyDocument], str]]] = {
    "yaml": _yaml,
    "json": _json,
    "notation": _notation,
    "xml": _xml,
}

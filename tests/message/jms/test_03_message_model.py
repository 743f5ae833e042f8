"""JMS 2.0, chapter 3: messages, their headers, properties, selectors and bodies."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import errors
from muster.message import codec, destinations, messages, selectors, values
from muster.message import errors as message_errors
from muster.predicates import ast
from muster.predicates.backends import python

K = values.JavaType
SAMPLES: dict[values.JavaType, values.Value] = {
    K.BOOLEAN: True,
    K.BYTE: 1,
    K.SHORT: 2,
    K.INT: 3,
    K.LONG: 4,
    K.FLOAT: 1.5,
    K.DOUBLE: 2.5,
    K.STRING: "7",
}
# The table of section 3.5.4: what may be read as what.
READABLE = {
    K.BOOLEAN: "zS",
    K.BYTE: "bsilS",
    K.SHORT: "silS",
    K.INT: "ilS",
    K.LONG: "lS",
    K.FLOAT: "fdS",
    K.DOUBLE: "dS",
    K.STRING: "zbsilfdS",
}


def _travelled(message: messages.JmsMessage) -> messages.JmsMessage:
    meta, data = message.meta()
    return codec.message_from_meta(messages.decode_meta(messages.encode_meta(meta)), data)


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("expected", SAMPLES)
def test_3_5_4_property_conversion(kind, expected):
    properties = values.Properties()
    properties.set("p", SAMPLES[kind], kind)
    if expected.value in READABLE[kind]:
        properties.get_as("p", expected)
    else:
        with pytest.raises(message_errors.FormatError):
            properties.get_as("p", expected)


@pytest.mark.parametrize(
    ("number", "single", "double"),
    [
        (0.1, "0.1", "0.1"),
        (100.0, "100.0", "100.0"),
        (-0.0, "-0.0", "-0.0"),
        (123456.789, "123456.79", "123456.789"),
        (1e7, "1.0E7", "1.0E7"),
        (-2.5e-10, "-2.5E-10", "-2.5E-10"),
        (1e100, "Infinity", "1.0E100"),
    ],
)
def test_3_5_4_numbers_are_written_as_java_writes_them(number, single, double):
    for kind, text in ((K.FLOAT, single), (K.DOUBLE, double)):
        assert values.read(values.typed(number, kind), K.STRING) == text


def test_3_5_4_a_string_that_is_no_number_and_a_missing_property():
    properties = values.Properties({"p": "seven"})
    for expected in (K.INT, K.DOUBLE):
        with pytest.raises(message_errors.FormatError):
            properties.get_as("p", expected)
    assert properties.get_as("p", K.BOOLEAN) is False
    assert properties.get_as("missing", K.STRING) is None
    assert properties.get_as("missing", K.BOOLEAN) is False
    with pytest.raises(message_errors.FormatError):
        properties.get_as("missing", K.INT)


@pytest.mark.parametrize("name", ["", "1st", "a b", "and", "NULL", "JMSXDeliveryCount"])
def test_3_5_1_property_names_are_identifiers(name):
    with pytest.raises(errors.InvalidInput):
        values.Properties({name: 1})


def test_3_5_values_must_fit_their_type():
    properties = values.Properties()
    for value, kind in ((128, K.BYTE), (1 << 31, K.INT), ("x", K.INT), (1, K.STRING), (True, K.INT)):
        with pytest.raises(message_errors.FormatError):
            properties.set("p", value, kind)
    with pytest.raises(message_errors.FormatError):
        properties.set("p", b"raw")


value = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.none(),
)


@given(st.lists(st.one_of(value, st.binary())), st.dictionaries(st.sampled_from("abcdef"), value))
def test_3_11_streams_maps_and_properties_travel_without_loss(items, properties):
    stream = messages.StreamMessage(items, properties=properties)
    message = _travelled(stream)
    assert isinstance(message, messages.StreamMessage)
    assert message.items == stream.items
    assert message.properties.typed == stream.properties.typed
    table = messages.MapMessage(dict(zip("abcdefgh", items, strict=False)))
    again = _travelled(table)
    assert isinstance(again, messages.MapMessage)
    assert again.items.typed == table.items.typed


@pytest.mark.parametrize("kind", [*SAMPLES, K.CHAR, K.BYTES])
def test_3_11_3_every_type_keeps_its_type(kind):
    extra: dict[values.JavaType, values.Value] = {K.CHAR: "x", K.BYTES: b"\x00\xff"}
    sample = (SAMPLES | extra)[kind]
    table = messages.MapMessage()
    table.items.set("v", sample, kind)
    message = _travelled(table)
    assert isinstance(message, messages.MapMessage)
    assert message.items.typed["v"] == values.TypedValue(kind, sample)


@pytest.mark.parametrize("number", [math.inf, -math.inf])
def test_3_5_infinities_travel(number):
    assert _travelled(messages.JmsMessage(properties={"x": number})).properties["x"] == number
    assert math.isnan(_travelled(messages.JmsMessage(properties={"x": math.nan})).properties["x"])  # type: ignore[arg-type]


def test_3_11_3_a_failed_read_of_a_stream_does_not_move_on():
    stream = messages.StreamMessage(["seven"])
    with pytest.raises(message_errors.NotReadable):
        stream.read(K.STRING)
    stream.reset()
    with pytest.raises(message_errors.FormatError):
        stream.read(K.INT)
    assert stream.read(K.STRING) == "seven"
    with pytest.raises(message_errors.FormatError):
        stream.read(K.STRING)


def test_3_4_headers_travel_and_the_payload_is_what_a_plain_client_expects():
    text = messages.TextMessage("héllo")
    text.correlation_id, text.type, text.priority = "c", "greeting", 9
    text.reply_to = destinations.queue("répliques")
    _, data = text.meta()
    assert data == "héllo".encode()
    message = _travelled(text)
    assert (message.correlation_id, message.type, message.priority) == ("c", "greeting", 9)
    assert message.reply_to == text.reply_to
    assert messages.MapMessage({"a": 1}).meta()[1] == b'{"a":1}'
    assert _travelled(messages.TextMessage(None)).body() is None
    assert _travelled(messages.TextMessage("")).body() == ""
    assert _travelled(messages.ObjectMessage({"x": [1]})).body() == {"x": [1]}


@pytest.mark.parametrize(
    ("selector", "matches"),
    [
        ("size = 3", True),
        ("size = '3'", False),
        ("NOT (size = '3')", True),
        ("missing = 1 OR missing IS NULL", True),
        ("NOT (missing = 1)", False),
        ("JMSPriority > 3 AND JMSType = 'note'", True),
        ("JMSDeliveryMode = 'PERSISTENT'", True),
        ("colour IN ('red', 'blue')", True),
        ("colour LIKE 'r_d' AND size BETWEEN 1 AND 0x3", True),
    ],
)
def test_3_8_selectors(selector, matches):
    message = messages.JmsMessage(properties={"size": 3, "colour": "red"})
    message.type = "note"
    assert selectors.accepts(selector, message.meta()[0]) is matches


def test_3_8_a_bad_selector_is_refused_where_it_is_wrong():
    with pytest.raises(errors.ParseError) as refused:
        selectors.compiled("size = = 3")
    assert refused.value.position == 7


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=30), st.integers(0, 3))
def test_3_8_the_index_finds_exactly_what_each_selector_accepts(filed, number):
    index: selectors.SelectorIndex[int] = selectors.SelectorIndex()
    expected = {}
    for key, (name, other) in enumerate(filed):
        expected[key] = (
            f"{name} = {other}"
            if key % 3
            else f"{name} = {other} AND b < 2"
            if key % 2
            else f"{name} > {other}"
        )
        index.add(key, expected[key])
    for key in list(expected)[::4]:
        index.remove(key)
        del expected[key]
    meta = messages.JmsMessage(properties={"a": number, "b": 1, "c": number % 2}).meta()[0]
    actual = list(index.matching(meta))
    assert sorted(actual) == [key for key, text in expected.items() if selectors.accepts(text, meta)]


def test_3_8_a_message_costs_with_the_selectors_that_may_match(monkeypatch: pytest.MonkeyPatch):
    looked = 0
    compile_condition = python.compile

    def compile_counted(condition: ast.Condition) -> selectors.Matches:
        def matches(get: Callable[[str], object]) -> bool:
            nonlocal looked
            looked += 1
            return made(get)

        made = compile_condition(condition)
        return matches

    monkeypatch.setattr(python, "compile", compile_counted)
    monkeypatch.setattr(selectors, "cache", selectors.SelectorCache())
    index: selectors.SelectorIndex[int] = selectors.SelectorIndex()
    for number in range(2_000):
        index.add(number, f"place = 'p{number % 500}' AND size > 1")
    meta = messages.JmsMessage(properties={"place": "p7", "size": 2}).meta()[0]
    assert sorted(index.matching(meta)) == [7, 507, 1007, 1507]
    assert looked == 4


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("+7", K.LONG, 7),
        ("\u0967\u0968", K.INT, 12),  # digits of any script, as in Java
        (" 1.5 ", K.DOUBLE, 1.5),
        ("1e3f", K.DOUBLE, 1000.0),
        ("0x1.8p1", K.DOUBLE, 3.0),
        ("-Infinity", K.DOUBLE, -math.inf),
        *((text, K.LONG, None) for text in ("", " 7", "7 ", "1_000", "0x10", "7L", "9223372036854775808")),
        *(
            (text, K.DOUBLE, None)
            for text in ("", "1_0.5", "inf", "nan", "1e", "0x10", "\u0967.5", "\u00a01.5")
        ),
    ],
)
def test_3_5_4_a_text_is_read_as_java_parses_it(text: str, kind: values.JavaType, expected: values.Value):
    item = values.TypedValue(K.STRING, text)
    if expected is None:
        with pytest.raises(message_errors.FormatError):
            values.read(item, kind)
    else:
        assert values.read(item, kind) == expected

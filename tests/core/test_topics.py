from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from muster.core import errors, subjects, topics

# Characters that mean something somewhere, so that they meet each other often.
TRICKY = "/\\=,;*>#+%.$_ \t\n\0\x7f25AFmustr\u00e9\u3000\U0001f600"
level = st.one_of(
    st.text(st.sampled_from(TRICKY), max_size=6),
    st.text(st.characters(codec="utf-8"), max_size=8),
    st.sampled_from(
        ["", "*", ">", "\\*", "\\\\>", "muster", "_INBOX", "$SYS", "%6Duster", "//", "/", ".", "%2F", " x"]
    ),
)
any_topic = (
    st.lists(level, min_size=1, max_size=topics.MAX_LEVELS)
    .map(tuple)
    .filter(lambda levels: levels != ("",))
    .map(topics.Topic)
)


def tag_topic(pairs: list[tuple[str, str]]) -> topics.Topic:
    return topics.Topic(tuple(itertools.chain.from_iterable(pairs)))


# -- the paper's example ----------------------------------------------------------------------------------


def test_the_papers_topic_in_three_notations() -> None:
    topic = topics.Topic.parse("Course/CPS616/Session/HPJava")
    assert topic == topics.Topic.parse("Course=CPS616,Session=HPJava")
    assert topic == topics.Topic.parse("subject:topic.Course.CPS616.Session.HPJava")
    assert (topic.path, topic.tags, topic.subject) == (
        "Course/CPS616/Session/HPJava",
        "Course=CPS616,Session=HPJava",
        "topic.Course.CPS616.Session.HPJava",
    )


def test_spaces_after_a_comma_as_the_paper_prints_them() -> None:
    assert topics.Topic.parse("Courses=CPS616, Session=HPJava").path == "Courses/CPS616/Session/HPJava"
    assert topics.Topic.parse("a=1, \\ b= 2 ").levels == (" b", " 2 ", "a", "1")


def test_a_value_may_contain_the_sign_of_a_pair() -> None:
    assert topics.Topic.parse("a=b=c").levels == ("a", "b=c")
    assert topics.Topic.parse("a=b=c=,d== \\=").levels == ("a", "b=c=", "d", "= =")
    assert topics.TopicPattern.parse("a=b=c").matches(topics.Topic.parse("a=b=c,d=e"))


def test_a_subscription_to_all_courses() -> None:
    pattern = topics.TopicPattern.parse("Courses=*, Session=HPJava")
    assert pattern.matches(topics.Topic.parse("Courses=CPS616,Session=HPJava"))
    assert pattern.matches(topics.Topic.parse("Courses=CPS714,Session=HPJava"))
    assert not pattern.matches(topics.Topic.parse("Courses=CPS714,Session=Fortran"))


# -- lossless both ways -----------------------------------------------------------------------------------


@given(any_topic)
@example(topics.Topic(("a\\", "b")))
@example(topics.Topic(("", "", "")))
@example(topics.Topic(("\\/", "\\\\*", "\\ ")))
def test_every_topic_reads_back_from_each_notation(topic: topics.Topic) -> None:
    assert topics.Topic.from_path(topic.path) == topic
    assert topics.Topic.from_tags(topic.tags) == topic
    assert topics.Topic.from_subject(topic.subject) == topic
    assert topics.Topic.parse(str(topic)) == topic
    assert topics.Topic.parse(f"tags:{topic.tags}") == topic


@given(st.one_of(st.text(max_size=40), st.text(st.sampled_from(TRICKY), max_size=12)))
def test_every_text_is_one_path_and_comes_back_as_it_was(text: str) -> None:
    try:
        pattern = topics.TopicPattern.from_path(text)
    except errors.MusterError:
        assume(False)
    assert topics.TopicPattern.parse(str(pattern)) == pattern
    assert str(pattern).removeprefix("path:") == text.removeprefix("path:")
    if (
        not any(isinstance(part, topics.Wildcard) for part in text.split("/"))
        and "*" not in text
        and ">" not in text
    ):
        assert topics.Topic.from_path(text).path == text


@given(any_topic, any_topic)
def test_different_topics_never_share_a_spelling(first: topics.Topic, other: topics.Topic) -> None:
    assume(first != other)
    assert first.path != other.path
    assert first.tags != other.tags
    assert first.subject != other.subject


@given(any_topic)
def test_subjects_are_what_the_broker_and_its_client_accept(topic: topics.Topic) -> None:
    prefix, *tokens = topic.subject.split(".")
    assert prefix == subjects.TOPIC_PREFIX
    assert len(tokens) == len(topic.levels)
    assert all(tokens)
    assert not any(character <= " " or character in "*>+#\x7f" for character in topic.subject)


@given(st.text(st.sampled_from("ab./%2FA5*>$_m "), max_size=12))
def test_a_subject_is_a_topics_or_is_refused(subject: str) -> None:
    try:
        topic = topics.Topic.from_subject(f"topic.{subject}")
    except errors.InvalidInput:
        return
    assert topic.subject == f"topic.{subject}"


@pytest.mark.parametrize(
    "subject", ["muster.app.all.x", "_INBOX.me.1", "$JS.API.INFO", "a.b", "topic.a..b", "topic.a/b"]
)
def test_foreign_subjects(subject: str) -> None:
    with pytest.raises(errors.InvalidInput, match="no topic's subject"):
        topics.Topic.from_subject(subject)


def test_a_subject_without_a_topic_is_none() -> None:
    with pytest.raises(errors.InvalidInput, match="needs a name"):
        topics.Topic.from_subject("topic")


def test_text_similar_to_an_escape_is_literal() -> None:
    assert topics.Topic.from_subject("topic.a.%2A.c%2").levels == ("a", "*", "c%2")


@pytest.mark.parametrize(
    ("path", "subject"),
    [
        ("a/b", "a.b"),
        ("/a", "/.a"),
        ("a/", "a./"),
        ("/", "/./"),
        ("a//b", "a./.b"),
        ("a.b/c", "a//b.c"),
        ("a b", "a%20b"),
        ("100%", "100%"),
        ("100%20", "100%2520"),
        ("muster/x", "muster.x"),
        ("_INBOX/x", "_INBOX.x"),
        ("$SYS/_x", "$SYS._x"),
        ("a/\\*/b", "a.%2A.b"),
        ("a/b*c>d", "a.b%2Ac%3Ed"),
        ("a\\/b", "a%2Fb"),
        ("é/😀", "é.😀"),
    ],
)
def test_paths_and_their_subjects(path: str, subject: str) -> None:
    assert topics.Topic.from_path(path).subject == f"topic.{subject}"


# -- tags -------------------------------------------------------------------------------------------------


def test_commas_join_a_set_and_semicolons_a_sequence() -> None:
    assert topics.Topic.parse("b=1,a=2").path == "a/2/b/1"
    assert topics.Topic.parse("b=1;a=2").path == "b/1/a/2"
    assert topics.Topic.from_path("b/1/a/2").tags == "b=1;a=2"
    assert topics.Topic.from_path("a/1/a/2").tags == "a=1;a=2"


def test_a_path_of_odd_length_ends_with_a_tag_without_value() -> None:
    topic = topics.Topic.parse("Course/CPS616/Session")
    assert topic.tags == "Course=CPS616,Session"
    assert topics.Topic.parse("Course=CPS616,Session") == topic
    assert topics.Topic.from_tags("news") == topics.Topic.from_path("news")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a=1,b,c=2", "has no value"),
        ("a=1,a=2", "occurs twice"),
        ("a=1,b=2;c=3", "not both"),
        ("a=*", "no wildcards"),
        ("tags:", "needs a name"),
        ("", "needs a name"),
        ("a/*/b", "no wildcards"),
        ("a/>", "no wildcards"),
        ("/".join("x" * 17), "17 levels"),
        ("x" * 2049, "2055 bytes"),
        ("é" * 1025, "2056 bytes"),
        (" " * 700, "2106 bytes"),
        ("x" * 10_000, "10000 characters"),
        ("a=" + "\\" * 100_000, "100002 characters"),
        ("\ud800", "surrogates"),
    ],
)
def test_what_cannot_be_a_topic_is_refused(text: str, fault: str) -> None:
    with pytest.raises((errors.InvalidInput, errors.LimitExceeded), match=fault):
        topics.Topic.parse(text)


@given(st.text(st.sampled_from(TRICKY), max_size=30))
def test_hostile_text_is_a_topic_or_a_clear_error(text: str) -> None:
    for read in (
        topics.Topic.parse,
        topics.Topic.from_tags,
        topics.TopicPattern.parse,
        topics.TopicPattern.from_tags,
    ):
        try:
            read(text)
        except (errors.InvalidInput, errors.LimitExceeded) as error:
            assert error.message  # noqa: PT017 - either outcome is right


# -- patterns ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("a/*/c", ["a/b/c", "a//c", "a/\\*/c"], ["a/c", "a/b/c/d", "a/b/x"]),
        ("a/>", ["a/b", "a/b/c", "a/"], ["a", "b/a"]),
        (">", ["a", "a/b", "muster/x"], []),
        ("a/\\*", ["a/\\*"], ["a/b"]),
        ("a/x*", ["a/x*"], ["a/xy"]),
        ("a/#", ["a/#"], ["a/b"]),
        ("subject:topic.a.*", ["a/b"], ["a/b/c"]),
        ("a=1", ["a=1", "a=1,b=2", "b=2;a=1", "a=1,c", "0=0,a=1,b=2"], ["a=2", "x/a/1", "1=a"]),
        ("a=*,b=2", ["a=1,b=2", "a=,b=2,c=3"], ["a=1", "b=2", "a=1,b=3", "b=2,a"]),
        ("a=1,b", ["a=1,b", "a=1,b=7"], ["a=1", "b=1"]),
        ("a=\\*", ["a=\\*,b=1"], ["a=1"]),
        ("a=*;b=2", ["a=1,b=2"], ["a=1,b=2,c=3", "b=2;a=1"]),
    ],
)
def test_what_patterns_match(pattern: str, yes: list[str], no: list[str]) -> None:
    compiled = topics.TopicPattern.parse(pattern)
    assert [text for text in yes if not compiled.matches(topics.Topic.parse(text))] == []
    assert [text for text in no if compiled.matches(topics.Topic.parse(text))] == []
    assert topics.TopicPattern.parse(str(compiled)) == compiled


@pytest.mark.parametrize(
    "text",
    [
        "a/>/b",
        "*=x",
        "",
        "tags:",
        "a=1;b;c=2",
        "/".join("*" * 17),
        ",".join(f"{n}=1" for n in range(9)),
        "x" * 5000,
    ],
)
def test_what_cannot_be_a_pattern_is_refused(text: str) -> None:
    with pytest.raises((errors.InvalidInput, errors.LimitExceeded)):
        topics.TopicPattern.parse(text)


small = st.sampled_from(["a", "b", "", "*", "muster"])
value = st.sampled_from(["1", "2", "", "*"])
pairs = st.lists(st.tuples(small, value), min_size=1, max_size=4)
wanted_value = st.one_of(value.map(lambda text: text.replace("*", "\\*")), st.just("*"))


@given(
    pairs.map(tag_topic),
    st.one_of(
        st.lists(st.tuples(st.sampled_from(["a", "b", "", "\\*"]), wanted_value), min_size=1, max_size=3).map(
            lambda expected: ",".join(f"{tag}={val}" for tag, val in expected)
        ),
        st.lists(st.sampled_from(["a", "*", "b", "1", ""]), min_size=1, max_size=4)
        .map("/".join)
        .filter(bool),
    ),
)
def test_a_message_is_delivered_exactly_once_if_it_matches(topic: topics.Topic, text: str) -> None:
    pattern = topics.TopicPattern.parse(text)
    arrivals = [
        via for via, subject in enumerate(pattern.subjects) if subjects.matches(subject, topic.subject)
    ]
    taken = [via for via in arrivals if pattern.take(topic.subject, via) is not None]
    assert len(taken) == (1 if pattern.matches(topic) else 0)
    assert len(pattern.subjects) <= 16
    if arrivals:
        assert subjects.matches(pattern.cover, topic.subject)


@given(pairs, pairs)
def test_a_topic_with_at_least_those_tags_matches(
    left: list[tuple[str, str]], more: list[tuple[str, str]]
) -> None:
    expected = ",".join(topics.Topic(pair).tags for pair in left)
    assert topics.TopicPattern.from_tags(expected).matches(tag_topic([*more, *left]))
    missing = set(left) - set(more)
    assert topics.TopicPattern.from_tags(expected).matches(tag_topic(more)) == (not missing)


def test_a_wide_pattern_takes_no_subject_that_is_not_a_topics() -> None:
    pattern = topics.TopicPattern.parse(">")
    assert pattern.take("muster.app.all.x") is None
    assert pattern.take("topic.a.b") == topics.Topic(("a", "b"))
    assert pattern.take("topic." + ".".join("x" * 40)) is None


@pytest.mark.parametrize(
    ("pattern", "subject", "yes"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
        ("*.b", "a.c", False),
        ("a.*.>", "a.b", False),
    ],
)
def test_subjects_match_as_the_broker_does(pattern: str, subject: str, yes: bool) -> None:
    assert subjects.matches(pattern, subject) is yes


# -- permissions ------------------------------------------------------------------------------------------


def test_several_tags_in_any_order_are_no_permission() -> None:
    with pytest.raises(errors.InvalidInput, match="cannot be a permission") as caught:
        topics.TopicPattern.parse("Region=north,Kind=meter").permitted()
    assert "semicolons" in (caught.value.hint or "")


@given(topic=any_topic, data=st.data())
@pytest.mark.parametrize("text", ["Region=north", "Region=*", "Region", "Kind=meter;Region=north", "a/*/b/>"])
def test_a_permission_covers_what_matches_and_nothing_else(
    text: str, topic: topics.Topic, data: st.DataObject
) -> None:
    pattern = topics.TopicPattern.parse(text)
    words = st.sampled_from(["Region", "north", "Kind", "meter", "a", "b", ""])
    near = topics.Topic(tuple(data.draw(st.lists(words, min_size=2, max_size=6))))
    for item in (topic, near):
        covered = any(subjects.matches(subject, item.subject) for subject in pattern.permitted())
        assert covered == pattern.matches(item)

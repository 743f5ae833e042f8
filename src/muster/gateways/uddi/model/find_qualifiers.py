"""Find qualifiers: how a search compares texts, and how its results are sorted.

Each has a short name and the key of a tModel; case is ignored.  Contradictory, unknown and repeated
qualifiers are rejected, and those that do not apply to a search.

Pure.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from muster.gateways.uddi.model import faults

_PREFIX = "uddi:uddi.org:findqualifier:"
_SORT_PREFIX = "uddi:uddi.org:sortorder:"

_KNOWN = {
    name.lower(): name
    for name in (
        "andAllKeys",
        "approximateMatch",
        "binarySort",
        "bindingSubset",
        "caseInsensitiveMatch",
        "caseInsensitiveSort",
        "caseSensitiveMatch",
        "caseSensitiveSort",
        "combineCategoryBags",
        "diacriticInsensitiveMatch",
        "diacriticSensitiveMatch",
        "exactMatch",
        "orAllKeys",
        "orLikeKeys",
        "serviceSubset",
        "signaturePresent",
        "sortByDateAsc",
        "sortByDateDesc",
        "sortByNameAsc",
        "sortByNameDesc",
        "suppressProjectedServices",
        "UTS-10",
    )
}


_SORTS = ("binarySort", "UTS-10")


def _key(name: str) -> str:
    # The standard writes diacritics in these keys, and diacritic in the names.
    return f"{_SORT_PREFIX if name in _SORTS else _PREFIX}{name.lower().replace('diacritic', 'diacritics')}"


#: The names, by the keys of their tModels.
BY_KEY = {_key(name): name for name in _KNOWN.values()}

#: The only searches to which some apply.
_SEARCHES = {
    "bindingSubset": ("find_business", "find_service"),
    "combineCategoryBags": ("find_business", "find_service"),
    "serviceSubset": ("find_business",),
    "suppressProjectedServices": ("find_business", "find_service"),
    **dict.fromkeys(
        ("sortByNameAsc", "sortByNameDesc"),
        ("find_business", "find_relatedBusinesses", "find_service", "find_tModel"),
    ),
}


#: At most one of each group is allowed.
_EXCLUSIVE = (
    ("andAllKeys", "orAllKeys", "orLikeKeys"),
    ("exactMatch", "approximateMatch"),
    ("exactMatch", "caseInsensitiveMatch"),
    ("exactMatch", "diacriticInsensitiveMatch"),
    ("caseSensitiveMatch", "caseInsensitiveMatch"),
    ("caseSensitiveSort", "caseInsensitiveSort"),
    ("diacriticSensitiveMatch", "diacriticInsensitiveMatch"),
    ("sortByNameAsc", "sortByNameDesc"),
    ("sortByDateAsc", "sortByDateDesc"),
    ("combineCategoryBags", "serviceSubset", "bindingSubset"),
    ("binarySort", "UTS-10"),
    ("binarySort", "caseInsensitiveSort"),
)


@dataclass(frozen=True, slots=True)
class FindQualifiers:
    names: frozenset[str] = frozenset()

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def fold(self, text: str) -> str:
        """Normalize a text for comparison."""
        if "caseInsensitiveMatch" in self:
            text = text.casefold()
        return _bare(text) if "diacriticInsensitiveMatch" in self else text

    def sort_key(self, text: str) -> str:
        return text.casefold() if "caseInsensitiveSort" in self or "UTS-10" in self else text


def _bare(text: str) -> str:
    parts = unicodedata.normalize("NFD", text)
    return "".join(character for character in parts if not unicodedata.combining(character))


def read(qualifiers: Iterable[str], search: str) -> FindQualifiers:
    """``search``: the name of the message."""
    names: set[str] = set()
    for qualifier in qualifiers:
        word = qualifier.strip().lower()
        name = BY_KEY.get(word) or _KNOWN.get(word)
        if name is None:
            raise faults.fault(faults.UddiErrorCode.UNSUPPORTED, f"unknown find qualifier {qualifier[:80]!r}")
        if search not in _SEARCHES.get(name, (search,)):
            raise faults.fault(
                faults.UddiErrorCode.UNSUPPORTED, f"the find qualifier {name} does not apply to {search}"
            )
        if name in names:
            raise faults.fault(
                faults.UddiErrorCode.VALUE_NOT_ALLOWED, f"the find qualifier {name} occurs twice"
            )
        names.add(name)
    for group in _EXCLUSIVE:
        both = [name for name in group if name in names]
        if len(both) > 1:
            raise faults.fault(
                faults.UddiErrorCode.INVALID_COMBINATION, f"{' and '.join(both)} contradict each other"
            )
    return FindQualifiers(frozenset(names))

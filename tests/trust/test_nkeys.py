import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import errors
from muster.trust import nkeys

# Made with another implementation of nkeys (the Go library).
KNOWN = [
    (
        "SOAM3RWZGUXKXEWIK674EAFMG7HL4SAYGHTLOG7EFT4VGLB4TETWSY3ECQ",
        "OAR5U335ZEFE25DKIBNGQOT6Q4FJ76M34CCOEJFILJEN2J6WBGVBZYJQ",
        "b19e804436f5458488c854f983a9a110af5baf38825f469371e2c5fa4fb149567997785268338445c52d1060127e65d7681effa3f5862d8c70654d72a5ad280e",
    ),
    (
        "SAAGEDBMELSFY2RZ5763IFTUWWUFCTW5UTOHH7DD2X6PZUKMZIOIWE23SA",
        "ADNHR7DFQWJT63GHSRAHSTBIJMUP5JYVTNFA6ADLIQA6V5JPXBV4MDLF",
        "e2ea7f495d23abc1129cd4803915b361321cce1d9e65402e5f2e49232194b441593d5158a352e0dcab4f329bc42def8cfbecc640449aea61e6ac4b1d8f4ee802",
    ),
    (
        "SUAHYUWVHYFUPEPVKYX43XMYLGVQ3QWQYCE6KPGJY7DBBLCVAUN2SXXBXA",
        "UB6OWVDOFCQVW2TXSJMHX3JCDWP5AGPIDZDVOBIXS3S4B4TZ2AUPU5VN",
        "224c96eee3f2739108d28c23b923bf3c9a405045adb607291327f50f28c24137175b384ddab8aa002044b01c30a9c988c36571ff3d157ca0383b5b115f066a06",
    ),
    (
        "SNAFFO4KTJODUF43W6LT2Z6LTY2BLWOB2VYKGGEXSHVDFVABGT3EFYVRME",
        "NCSUYYG6N3X62EQS63WZAFVFVPSEHMPA22RR7TPQQKKFTCN3YDCGNJYE",
        "051bfb4b0d88e91ee8cb6f979b5666f24ac248566db32dda1e2f7470056f66ac6e6baf5e76efe72f04a3099e9a09999b88380f3b6e190243be633840ee201308",
    ),
    (
        "SCAHLIGL7JVD342IBNZNNQ3YTOAVJE6JAYE5QE7H5EPNO56VE7KZDNWEOU",
        "CBGHK4XLHCRNKIMYVYIH4ZAKKDSBP7D34FRLHPCJAFJK4ULNOTUFIDGF",
        "b53763f61fe2bada04f3b57805a1231bb91079cb7dfc5f4316809cd8b78c2cdc0d6555b41bea4ae3d8333652128cfc24d09171d85ac650489b8ae23341578e0f",
    ),
]


@pytest.mark.parametrize("kind", list(nkeys.KeyKind))
def test_a_key_has_a_kind_and_signs(kind):
    pair = nkeys.KeyPair.create(kind)
    assert pair.public[0] == kind.letter
    assert pair.seed[:2] == "S" + kind.letter
    assert nkeys.kind_of(pair.public) is kind
    again = nkeys.KeyPair.from_seed(pair.seed)
    assert (again.public, again.kind) == (pair.public, kind)
    nkeys.verify(pair.public, b"data", again.sign(b"data"))
    with pytest.raises(errors.Unauthorized):
        nkeys.verify(pair.public, b"date", pair.sign(b"data"))
    assert pair.seed not in repr(pair)


@pytest.mark.parametrize(("seed", "public", "signature"), KNOWN)
def test_keys_agree_with_another_implementation(seed, public, signature):
    pair = nkeys.KeyPair.from_seed(seed)
    assert pair.public == public
    assert pair.sign(b"muster").hex() == signature


def test_one_mistyped_character_is_noticed():
    public = nkeys.KeyPair.create(nkeys.KeyKind.USER).public
    for position in range(len(public)):
        for letter in "A7Z":
            if letter != public[position]:
                with pytest.raises(errors.InvalidInput):
                    nkeys.kind_of(public[:position] + letter + public[position + 1 :])


def test_a_seed_has_one_spelling():
    seed = nkeys.KeyPair.create(nkeys.KeyKind.USER).seed
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
    for stray in range(1, 4):  # the last character carries two bits that mean nothing
        other = alphabet[alphabet.index(seed[-1]) ^ stray]
        with pytest.raises(errors.InvalidInput):
            nkeys.KeyPair.from_seed(seed[:-1] + other)
    with pytest.raises(errors.InvalidInput):
        nkeys.KeyPair.from_seed(seed.lower())


def test_a_seed_is_never_repeated_in_an_error():
    seed = nkeys.KeyPair.create(nkeys.KeyKind.USER).seed
    for wrong in (seed[:-1], seed + "A", seed[:-2] + "00", "A" + seed[1:]):
        with pytest.raises(errors.InvalidInput) as caught:
            nkeys.KeyPair.from_seed(wrong)
        assert wrong[5:20] not in str(caught.value)


def test_a_key_of_another_kind_is_refused_by_name():
    with pytest.raises(errors.InvalidInput, match="user"):
        nkeys.require_kind(nkeys.KeyPair.create(nkeys.KeyKind.ACCOUNT).public, nkeys.KeyKind.USER)


KEYLIKE = st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567SUO=a é\x00", min_size=50, max_size=60)


@given(st.one_of(st.text(), KEYLIKE))
def test_hostile_text_gives_only_our_error(text):
    with pytest.raises(errors.InvalidInput):
        nkeys.kind_of(text)
    with pytest.raises(errors.InvalidInput):
        nkeys.KeyPair.from_seed(text)


@given(st.binary(max_size=80))
def test_hostile_signatures_give_only_our_error(signature):
    public = nkeys.KeyPair.create(nkeys.KeyKind.USER).public
    with pytest.raises(errors.Unauthorized):
        nkeys.verify(public, b"data", signature)

"""The secure sum: it is the sum of those who stayed, whoever drops out when; and the server sees nothing else."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("cryptography")

from fedaudit.aggregation.secure import graph
from fedaudit.aggregation.secure.keys import add_mask
from fedaudit.aggregation.secure.protocol import SEALED, Member, Revealed, total
from fedaudit.aggregation.secure.ring import Part, Ring
from fedaudit.aggregation.secure.shamir import PRIME, joined
from fedaudit.errors import RunError

SHARE = 0.6


def secret(k: int, trial: int = 0) -> bytes:
    return hashlib.sha256(f"{k}/{trial}".encode()).digest()


def summed(vectors, drops=((), (), (), ()), *, share=SHARE, trial=0, degree=None):
    """Carry out one sum. `drops`: who leaves before each phase. Returns the sum, who is in it, and what was sent."""
    members = {k: Member(k, secret(k, trial)) for k in vectors}
    keys = {k: members[k].advertise() for k in vectors if k not in drops[0]}
    near = graph.neighbours(list(keys), degree or graph.degree(len(keys), share), trial)
    roster = {k: {v: keys[v] for v in near[k]} for k in keys}
    sealed = {k: members[k].share(roster[k], share) for k in keys if k not in drops[1]}
    masked = {
        k: members[k].mask(vectors[k], {v: keys[v] for v in near[k] if v in sealed})
        for k in sealed
        if k not in drops[2]
    }
    revealed = {}
    for k in masked:
        if k not in drops[3]:
            around = [*near[k], k]
            inbox = {v: sealed[v][k] for v in near[k] if v in sealed}
            dropped = [v for v in around if v in sealed and v not in masked]
            revealed[k] = members[k].unmask(roster[k], inbox, [v for v in around if v in masked], dropped, share)
    return total(masked, keys, near, list(sealed), revealed, share), sorted(masked), masked


def drawn(n, length=7, seed=0):
    rng = np.random.default_rng(seed)
    return {k: rng.integers(0, 1 << 32, length, dtype=np.uint64).astype(np.uint32) for k in range(n)}


def plain(vectors, ids):
    out = np.zeros_like(next(iter(vectors.values())))
    for k in ids:
        out += vectors[k]
    return out


def test_it_is_the_sum():
    vectors = drawn(6, 100_000)  # several chunks of a mask
    found, ids, masked = summed(vectors)
    assert ids == [0, 1, 2, 3, 4, 5]
    assert np.array_equal(found, plain(vectors, ids))
    assert all((masked[k] != vectors[k]).mean() > 0.99 for k in ids)


@pytest.mark.parametrize("pattern", range(30))
def test_any_drop_outs_in_any_phase(pattern):
    """Of 12 clients each leaves with probability 0.08 before each phase: the sum of those who stayed, or no sum."""
    vectors, rng = drawn(12, seed=pattern), np.random.default_rng(pattern)
    drops = [set(np.flatnonzero(rng.random(12) < 0.08).tolist()) for _ in range(4)]
    began = 12 - len(drops[0])
    stayed = set(range(12)) - drops[0] - drops[1] - drops[2]
    helped = stayed - drops[3]
    enough = len(helped) >= graph.needed(SHARE, began) and len(stayed) >= graph.needed(SHARE, began)
    if not enough:
        with pytest.raises(RunError, match="threshold"):
            summed(vectors, drops, trial=pattern)
        return
    found, ids, _ = summed(vectors, drops, trial=pattern)
    assert set(ids) == stayed
    assert np.array_equal(found, plain(vectors, ids))


@pytest.mark.parametrize("phase", range(4))
def test_one_of_each_phase_is_recovered_and_left_out(phase):
    drops = [(), (), (), ()]
    drops[phase] = (3,)
    found, ids, _ = summed(drawn(6), drops)
    assert ids == ([0, 1, 2, 4, 5] if phase < 3 else [0, 1, 2, 3, 4, 5])
    assert np.array_equal(found, plain(drawn(6), ids))


def test_a_sparse_graph_gives_the_same_sum():
    vectors = drawn(40)
    found, ids, _ = summed(vectors, ((), (5,), (7, 9), ()), degree=16)
    assert len(ids) == 37
    assert np.array_equal(found, plain(vectors, ids))


@pytest.mark.parametrize("phase", [2, 3])
def test_below_the_threshold_there_is_no_sum(phase):
    """needed(0.6, 5) = 3 of 5 must help; two do."""
    drops = [(), (), (), ()]
    drops[phase] = (0, 1, 2)
    with pytest.raises(RunError, match="threshold"):
        summed(drawn(5), drops)


def member(k=0, n=5):
    members = {v: Member(v, secret(v)) for v in range(n)}
    roster = {v: m.advertise() for v, m in members.items() if v != k}
    sealed = {v: m.share({u: members[u].advertise() for u in range(n) if u != v}, SHARE)[k]
              for v, m in members.items() if v != k}  # fmt: skip
    return members[k], roster, sealed


def test_both_shares_of_one_client_are_refused():
    who, roster, sealed = member()
    with pytest.raises(RunError, match="both shares of client 2"):
        who.unmask(roster, sealed, [0, 1, 2, 3, 4], [2], SHARE)
    given = who.unmask(roster, sealed, [0, 1, 3, 4], [2], SHARE)
    assert set(given.own) == {0, 1, 3, 4}
    assert set(given.keys) == {2}


@pytest.mark.parametrize(
    ("stayed", "dropped", "words"),
    [
        ([0, 1, 2, 3, 9], [], "shares of client 9"),
        ([1, 2, 3, 4], [0], "shares of client 0"),
        ([0, 1], [2], "threshold is 3"),
    ],
)
def test_a_server_that_asks_for_too_much_gets_nothing(stayed, dropped, words):
    who, roster, sealed = member()
    with pytest.raises(RunError, match=words):
        who.unmask(roster, sealed, stayed, dropped, SHARE)


def test_a_changed_share_does_not_open():
    who, roster, sealed = member()
    sealed[3] = bytes([sealed[3][0] ^ 1]) + sealed[3][1:]
    with pytest.raises(RunError, match="client 3 sealed was changed"):
        who.unmask(roster, sealed, [0, 1, 2, 3, 4], [], SHARE)


def test_one_key_for_two_neighbours_is_refused():
    who, roster, _ = member()
    with pytest.raises(RunError, match="one key for two"):
        who.share({**roster, 1: roster[2]}, SHARE)


def test_wrong_shares_of_a_key_are_noticed():
    members = {k: Member(k, secret(k)) for k in range(4)}
    keys = {k: m.advertise() for k, m in members.items()}
    near = graph.neighbours(range(4), 3, 0)
    masked = {k: members[k].mask(np.zeros(3, np.uint32), {v: keys[v] for v in near[k]}) for k in (0, 1, 2)}
    sealed = {k: m.share({v: keys[v] for v in near[k]}, SHARE) for k, m in members.items()}
    revealed = {}
    for k in (0, 1, 2):
        inbox = {v: sealed[v][k] for v in near[k]}
        given = members[k].unmask({v: keys[v] for v in near[k]}, inbox, [0, 1, 2], [3], SHARE)
        revealed[k] = Revealed(given.own, {3: given.keys[3] ^ ((k == 1) << 100)})
    with pytest.raises(RunError, match=r"do not give its key|not belong together"):
        total(masked, keys, near, [0, 1, 2, 3], revealed, SHARE)


# --- what the server sees -------------------------------------------------------------------------------------------


def bytes_seen(vectors, k, trials, length=64):
    return np.concatenate([summed(vectors, trial=t)[2][k].view(np.uint8) for t in range(trials)])


@pytest.mark.parametrize("value", [0, 1, 0x80000000, 0xFFFFFFFF])
def test_a_masked_vector_is_uniform_whatever_it_masks(value):
    """Chi-square on the bytes of client 1's masked vector over 60 sums: 255 degrees of freedom, level 0.001."""
    vectors = {k: np.full(64, value if k == 1 else 7, np.uint32) for k in range(3)}
    seen = np.bincount(bytes_seen(vectors, 1, 60), minlength=256)
    assert stats.chisquare(seen).pvalue > 1e-3


def test_exchanged_clients_look_alike_where_the_sum_is_the_same():
    """Two clients exchange their vectors. The sum is the same, and so is the law of all that the server sees."""
    a, b = np.full(64, 3, np.uint32), np.full(64, 0xFFFF0000, np.uint32)
    one, other = {0: a, 1: b, 2: a}, {0: b, 1: a, 2: a}
    assert np.array_equal(summed(one)[0], summed(other)[0])
    for k in (0, 1):
        table = [np.bincount(bytes_seen(w, k, 60), minlength=256) for w in (one, other)]
        assert stats.chi2_contingency(table).pvalue > 1e-3


def test_no_mask_is_used_twice():
    """Over sums, clients and pairs: the words of masked zero vectors repeat no more often than chance has it."""
    zeros = {k: np.zeros(256, np.uint32) for k in range(4)}
    words = np.concatenate([m for t in range(20) for m in summed(zeros, trial=t)[2].values()])
    assert len(words) - len(np.unique(words)) <= 5  # expected 0.05 among 20,480 words of 32 bits
    own = np.concatenate([Member(k, secret(k, t)).mask(zeros[0], {}) for t in range(20) for k in range(4)])
    assert len(own) - len(np.unique(own)) <= 5


# --- agreement ------------------------------------------------------------------------------------------------------


def test_the_sum_is_flower_s():
    """The same weights through Flower's SecAgg+ parts (its quantisation, keys, generator, ring): the same mean.

    Flower: range 4, 2^20 levels, ring 2^32, stochastic rounding: within one level. Ours: `Ring.error`.
    """
    flower = pytest.importorskip("flwr.common.secure_aggregation.quantization")
    from cryptography.hazmat.primitives.asymmetric import ec
    from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    rng = np.random.default_rng(5)
    w = {k: rng.normal(0, 1, 500).clip(-4, 4) for k in range(5)}
    clip, levels, mod = 4.0, 1 << 20, 1 << 32
    pairs = {k: ec.generate_private_key(ec.SECP384R1()) for k in w}
    theirs = np.zeros(500, np.int64)
    for k, vector in w.items():
        (q,) = flower.quantize([vector], clip, levels)
        masked = q.astype(np.int64)
        for v in w:
            if v != k:
                (m,) = pseudo_rand_gen(generate_shared_key(pairs[k], pairs[v].public_key()), mod, [(500,)])
                masked = masked + m if k > v else masked - m
        theirs += masked % mod
    theirs = theirs % mod
    (flower_sum,) = flower.dequantize([theirs], clip, levels)
    flower_mean = (flower_sum - (len(w) - 1) * clip) / len(w)

    ring = Ring((Part(500, clip),), len(w))
    found, _, _ = summed({k: ring.encoded([vector])[0] for k, vector in w.items()})
    ours = ring.decoded(found)[0] / len(w)
    exact = sum(w.values()) / len(w)
    assert np.abs(ours - exact).max() <= ring.error(5, 5)
    assert np.abs(flower_mean - exact).max() <= 2 * clip / levels
    assert np.abs(ours - flower_mean).max() <= 2 * clip / levels + ring.error(5, 5)


# --- secrets and shares ---------------------------------------------------------------------------------------------


def drawn_bytes(of: bytes, purpose: str, size: int) -> bytes:
    """HKDF with SHA-256, then AES-256 in counter mode, by the library alone."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    key = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=f"fedaudit/{purpose}".encode()).derive(of)
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(size))


@pytest.mark.parametrize("purpose", ["own", "key"])
def test_the_coefficients_of_shares_fill_the_field(purpose):
    """With a coefficient of zero, one share alone would be the secret."""
    who = Member(3, secret(3))
    stream = drawn_bytes(secret(3), f"{purpose} coefficients", 192)
    found = who._coefficients(purpose, 4)
    assert found == [int.from_bytes(stream[i : i + 64], "little") % PRIME for i in (0, 64, 128)]
    assert all(c >> 200 for c in found)
    assert who._coefficients(purpose, 1) == []


def test_shares_are_made_anew_for_other_neighbours_and_kept_for_the_same():
    who = Member(3, secret(3))
    own, keys = who._shares([5, 1], 2)
    assert set(own) == set(keys) == {2, 4, 6}, "each at the point of its client, its own among them"
    assert who._shares([1, 5], 2)[0] is own
    more, _ = who._shares([5, 1, 7], 2)
    assert set(more) == {2, 4, 6, 8}
    other, _ = who._shares([5, 1], 3)
    assert other != own
    assert joined({x: own[x] for x in (2, 6)}, 2) == joined(other, 3) == who._own
    assert joined({x: keys[x] for x in (4, 6)}, 2) == who._mask.private
    assert own != keys


def test_two_clients_share_with_each_other_and_a_roster_with_oneself_is_refused():
    a, b = Member(0, secret(0)), Member(1, secret(1))
    sealed = a.share({1: b.advertise()}, SHARE)
    assert list(sealed) == [1]
    assert len(sealed[1]) == SEALED == 2 * 33 + 16
    for roster in ({}, {0: a.advertise()}, {0: a.advertise(), 1: b.advertise()}):
        with pytest.raises(RunError, match="without neighbours, or with itself"):
            a.share(roster, SHARE)
    found, ids, _ = summed(drawn(2))
    assert ids == [0, 1]
    assert np.array_equal(found, plain(drawn(2), ids))


def test_of_a_neighbour_that_sealed_nothing_nothing_is_given():
    who, roster, sealed = member()
    del sealed[4]
    given = who.unmask(roster, sealed, [0, 1, 2, 4], [3], SHARE)
    assert (set(given.own), set(given.keys)) == ({0, 1, 2}, {3})
    with pytest.raises(RunError, match="2 clients around client 0 stayed, the threshold is 3"):
        who.unmask(roster, sealed, [0, 1], [], SHARE)
    assert len(who.unmask(roster, sealed, [0, 1, 2], [], SHARE).own) == 3, "as many as the threshold are enough"


def test_a_mask_is_the_own_one_and_those_of_pairs_with_opposite_signs():
    """Client 1 adds the mask that it shares with client 2, and subtracts the one that it shares with client 0."""
    members = {k: Member(k, secret(k)) for k in range(3)}
    keys = {k: m.advertise() for k, m in members.items()}
    zeros = np.zeros(5, np.uint32)
    own = {k: m.mask(zeros, {}) for k, m in members.items()}
    with_two = members[1].mask(zeros, {2: keys[2]}) - own[1]
    with_none = members[1].mask(zeros, {0: keys[0]}) - own[1]
    assert np.array_equal(members[1].mask(zeros, {0: keys[0], 2: keys[2]}), own[1] + with_two + with_none)
    assert np.array_equal(members[2].mask(zeros, {1: keys[1]}) - own[2], -with_two)
    assert np.array_equal(members[0].mask(zeros, {1: keys[1]}) - own[0], -with_none)
    pair = members[1]._mask.agree(keys[2].mask, "mask")
    stream = np.zeros(5, np.uint32)
    add_mask(stream, pair, 1)
    assert np.array_equal(with_two, stream), "the smaller number adds"
    given = np.arange(5, dtype=np.uint32)
    members[0].mask(given, {1: keys[1]})
    assert given.tolist() == [0, 1, 2, 3, 4], "the vector itself stays"

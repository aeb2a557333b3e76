"""Sampling without a sort against numpy with one: which tokens may be drawn, how often, and from whose noise."""

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
import pytest
from engines import generate, make_llm

from pallas_kernels.logit_rules import LogitRules
from pallas_kernels.sampling import BLOCK, Ruled, draw, gumbel, lowest_kept, threefry
from prefix_jax import SamplingParams
from prefix_jax.sampler import SamplingRows, sample

IMPLEMENTATIONS = ["xla", "pallas_interpret"]
jitted_sample = jax.jit(sample, static_argnames="implementation")
jitted_lowest_kept = jax.jit(lowest_kept, static_argnames="implementation")


def kept_by_rule(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> np.ndarray:
    """bool [V]: the top_k largest that are at least min_p times as likely as the best, then of these the smallest set
    with a mass of at least top_p; ties with its last."""
    x = logits.astype(np.float64)
    kept = x >= np.sort(x)[-min(top_k, len(x))] if top_k > 0 else np.ones(len(x), bool)
    kept &= np.exp((x - x.max()) / (temperature or 1)) >= min_p
    if top_p < 1:
        mass = np.where(kept, np.exp((x - x.max()) / (temperature or 1)), 0)
        order = np.argsort(-x, kind="stable")
        reached = np.cumsum(mass[order]) >= top_p * mass.sum() * (1 - 1e-6)
        kept &= x >= x[order[np.argmax(reached)]]
    return kept


def no_rows_ruled(logits) -> Ruled:
    logits = jnp.asarray(logits, jnp.float32)
    return Ruled(logits, logits, jnp.zeros(len(logits), jnp.int32))


def lowest(logits, temperature, top_k, top_p, implementation, min_p=0.0) -> np.ndarray:
    """float32 [B]: the smallest logit that may be drawn, for every row with its own parameters."""
    logits = np.atleast_2d(np.asarray(logits, np.float32))
    rows = len(logits)
    spread = (jnp.asarray(np.broadcast_to(np.asarray(value, dtype), rows)) for value, dtype in
              ((temperature, np.float32), (top_k, np.int32), (top_p, np.float32), (min_p, np.float32)))  # fmt: skip
    return np.asarray(jitted_lowest_kept(no_rows_ruled(logits), *spread, implementation=implementation))


def rows_of(count: int, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=None, position=None) -> SamplingRows:
    """Rows of equal or given parameters; by default every row has a seed and a position of its own."""

    def spread(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), count))

    seeds = np.arange(count) if seed is None else np.broadcast_to(seed, count)
    return SamplingRows(
        temperature=spread(temperature, np.float32),
        top_k=spread(top_k, np.int32),
        top_p=spread(top_p, np.float32),
        min_p=spread(min_p, np.float32),
        row=spread(0, np.int32),
        last_token=spread(0, np.int32),
        num_logprobs=spread(-1, np.int32),
        target=spread(-1, np.int32),
        seed=jnp.asarray(np.stack([seeds * 0 + 7, seeds], axis=1).astype(np.uint32)),
        position=spread(np.arange(count) if position is None else position, np.int32),
    )


def sampled(logits, rows: SamplingRows, implementation: str) -> np.ndarray:
    logits = jnp.asarray(logits, jnp.float32)
    return np.asarray(
        jitted_sample(logits, rows, LogitRules.empty(1, logits.shape[1]), implementation=implementation)[0]
    )


def check_shares(tokens: np.ndarray, probabilities: np.ndarray, limit: float) -> None:
    """Chi-square of drawn tokens against their probabilities; `limit` is the value of p = 1e-4."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert not counts[probabilities == 0].any(), "a token was drawn that may not be"
    expected = (probabilities * len(tokens))[probabilities > 0]
    assert ((counts[probabilities > 0] - expected) ** 2 / expected).sum() < limit


# Which tokens may be drawn --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.6, {3, 2}), (0.3999999, {3}), (0.39, {3}), (0.41, {3, 2}), (0.71, {3, 2, 1}), (1.0, {0, 1, 2, 3}), (1e-6, {3})],
)
def test_top_p_keeps_the_token_that_reaches_the_mass(top_p, kept, implementation):
    """The mask removes the first token that reaches p: nano-vllm#260 (C42)."""
    logits = np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32))
    (bound,) = lowest(logits, 1, 0, top_p, implementation)
    assert set(np.flatnonzero(logits >= bound)) == kept


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ties_with_the_last_token_of_a_set_stay(implementation):
    """C42: nano-vllm#260."""
    logits = np.array([0, 1, 1, 1, 2], np.float32)
    for top_k, top_p, expected in [(2, 1, 1), (1, 1, 2), (4, 1, 1), (5, 1, 0), (0, 0.5, 1), (0, 1e-6, 2), (3, 0.99, 1)]:
        assert lowest(logits, 1, top_k, top_p, implementation) == expected, (top_k, top_p)
    assert lowest(np.full(5, -3.5), 1, 3, 0.2, implementation) == -3.5, "all alike: all stay"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("vocab", [1, 300, BLOCK, BLOCK + 1])
def test_the_kept_set_is_that_of_a_sort(vocab, implementation):
    rng = np.random.default_rng(vocab)
    rows = 12 if vocab < BLOCK else 3
    logits = (rng.standard_normal((rows, vocab)) * rng.choice([0.1, 1, 10, 80], (rows, 1))).astype(np.float32)
    logits[::2] = np.round(logits[::2])  # ties
    temperature = rng.choice([0.01, 0.5, 1, 3], rows)
    top_k = rng.choice([0, 1, 2, 7, vocab - 1, vocab], rows)
    top_p = rng.choice([1e-6, 0.1, 0.5, 0.9, 0.999, 1], rows)
    min_p = rng.choice([0, 0, 1e-3, 0.5, 1], rows)
    bounds = lowest(logits, temperature, top_k, top_p, implementation, min_p)
    for row in range(rows):
        expected = kept_by_rule(logits[row], temperature[row], top_k[row], top_p[row], min_p[row])
        difference = (logits[row] >= bounds[row]) != expected
        if difference.any():  # the mass of a token this close to p is lost in the rounding of a sum
            mass = np.exp((logits[row].astype(np.float64) - logits[row].max()) / temperature[row])
            near_min_p = np.abs(mass / max(min_p[row], 1e-9) - 1) < 1e-4
            assert mass[difference & ~near_min_p].sum() / mass.sum() < 1e-5, (
                row,
                temperature[row],
                top_k[row],
                top_p[row],
            )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_top_k_is_off_at_0_and_beyond_the_vocabulary(implementation):
    """The default top_k makes sampling greedy whatever the temperature: tpu-inference#1386 (C43)."""
    vocab, count = 6, 1500 if implementation == "xla" else 300
    logits = np.tile(np.log(np.arange(1, vocab + 1)), (count, 1))
    shares = np.arange(1, vocab + 1) / 21
    for top_k in (0, vocab, vocab + 1):
        check_shares(sampled(logits, rows_of(count, top_k=top_k), implementation), shares, 25.7)
    assert set(sampled(logits, rows_of(count, top_k=1), implementation)) == {vocab - 1}
    mixed = sampled(logits, rows_of(count, top_k=np.arange(count) % 3), implementation)
    assert set(mixed[1::3]) == {vocab - 1} and set(mixed[2::3]) == {vocab - 1, vocab - 2}
    assert set(mixed[0::3]) == set(range(vocab)), "neighbours that ask for less do not matter"


def test_minus_one_is_off_too():
    """C43: tpu-inference#1386. The engine hands a row's -1 to the device as 0."""
    llm = make_llm()
    answers = [
        generate(llm, [[5, 6, 7]], SamplingParams(top_k=top_k, seed=3, max_tokens=20, ignore_eos=True))[0]
        .outputs[0]
        .token_ids
        for top_k in (-1, 0, 300, 301, 1)
    ]
    assert answers[0] == answers[1] == answers[2] == answers[3] != answers[4]
    assert (
        generate(llm, [[5, 6, 7]], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0]
        .outputs[0]
        .token_ids
        == answers[4]
    )


# How they are drawn ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("scale", [1.0, 80.0])
def test_tiny_temperatures_are_greedy_and_no_row_minds_another(scale, implementation):
    """logits / 1e-4 overflows, a greedy row beside sampled ones divides by zero: vllm#1623, vllm-ascend#16503 (C44)."""
    rng = np.random.default_rng(1)
    temperatures = np.array([0, 1e-8, 1e-5, 1e-4, 1e-2, 1, 1e3, 0, 3e38], np.float32)
    logits = (scale * rng.uniform(-1, 1, (len(temperatures), 400))).astype(np.float32)
    logits[np.arange(len(logits)), rng.integers(0, 400, len(logits))] = scale * 1.2
    for top_k, top_p in [(0, 1.0), (5, 0.9), (0, 1e-6)]:
        rows = rows_of(len(temperatures), temperature=temperatures, top_k=top_k, top_p=top_p)
        tokens = sampled(logits, rows, implementation)
        assert ((tokens >= 0) & (tokens < 400)).all()
        np.testing.assert_array_equal(tokens[[0, 1, 2, 3, 7]], logits.argmax(axis=1)[[0, 1, 2, 3, 7]])
        alone = [
            sampled(logits[i : i + 1], jax.tree.map(lambda x, i=i: x[i : i + 1], rows), implementation)[0]
            for i in range(len(temperatures))
        ]
        assert tokens.tolist() == alone


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_greedy_takes_the_first_of_equal_bests(implementation):
    logits = np.zeros((3, 2 * BLOCK + 5), np.float32)
    logits[0, [7, BLOCK + 3, 2 * BLOCK + 1]] = 1
    logits[1] = -np.inf
    logits[1, 2 * BLOCK + 4] = -80
    assert sampled(logits, rows_of(3, temperature=0), implementation).tolist() == [7, 2 * BLOCK + 4, 0]


@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 20}, {"top_p": 0.7, "temperature": 0.3}, {"top_k": 50, "top_p": 0.2}, {"min_p": 0.01}]
)
def test_both_implementations_draw_the_same_token(settings):
    logits = np.random.default_rng(2).standard_normal((8, BLOCK + 77)).astype(np.float32) * 4
    rows = rows_of(8, **settings)
    np.testing.assert_array_equal(*(sampled(logits, rows, implementation) for implementation in IMPLEMENTATIONS))
    asked = rows.temperature, rows.top_k, rows.top_p
    np.testing.assert_array_equal(*(lowest(logits, *asked, how, rows.min_p) for how in IMPLEMENTATIONS))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_sample_hangs_on_its_own_row_alone(implementation):
    """A seeded row is drawn from a shared key or by its row index: vllm#51226 (C51)."""
    logits = np.random.default_rng(3).standard_normal((9, 300)).astype(np.float32)
    rows = rows_of(9, temperature=np.tile([1, 0.5, 0], 3), top_k=np.arange(9) * 3, top_p=np.linspace(0.3, 1, 9))
    tokens = sampled(logits, rows, implementation)
    order = np.random.default_rng(4).permutation(9)
    moved = sampled(logits[order], jax.tree.map(lambda x: x[order], rows), implementation)
    np.testing.assert_array_equal(moved, tokens[order])
    padded = np.concatenate([logits, np.full((9, 212), -np.inf, np.float32)], axis=1)
    np.testing.assert_array_equal(sampled(padded, rows, implementation), tokens)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, 42.6),
        ({"temperature": 0.5}, 42.6),
        ({"top_k": 4}, 21.1),
        ({"top_p": 0.5}, 42.6),
        ({"top_k": 6, "top_p": 0.9}, 42.6),
        ({"min_p": 0.3, "temperature": 0.7}, 42.6),
        ({"min_p": 0.05, "top_p": 0.8, "top_k": 8}, 42.6),
    ],
)
def test_tokens_come_as_often_as_they_should(settings, limit, implementation):
    count, vocab = 2000 if implementation == "xla" else 400, 12
    logits = np.random.default_rng(5).standard_normal(vocab).astype(np.float32)
    temperature = settings.get("temperature", 1.0)
    kept = kept_by_rule(
        logits, temperature, settings.get("top_k", 0), settings.get("top_p", 1.0), settings.get("min_p", 0.0)
    )
    shares = np.where(kept, np.exp(logits.astype(np.float64) / temperature), 0)
    by_seed = sampled(np.tile(logits, (count, 1)), rows_of(count, position=3, **settings), implementation)
    by_position = sampled(np.tile(logits, (count, 1)), rows_of(count, seed=11, **settings), implementation)
    for tokens in (by_seed, by_position):
        check_shares(tokens, shares / shares.sum(), limit)
    assert (by_seed != by_position).any()


# Noise ----------------------------------------------------------------------------------------------------------------


def test_threefry_is_the_published_one():
    """Known answers of Random123, and JAX's own."""
    known = [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ]
    for key, counter, expected in known:
        words = threefry(*(jnp.uint32(word) for word in (*key, *counter)))
        assert tuple(int(word) for word in words) == expected
    key = jnp.array([123, 456], jnp.uint32)
    counters = jnp.arange(20, dtype=jnp.uint32)
    ours = jnp.concatenate(threefry(key[0], key[1], counters[:10], counters[10:]))
    np.testing.assert_array_equal(ours, jax.extend.random.threefry_2x32(key, counters))


def test_gumbel_noise_is_finite_and_has_its_mean_and_variance():
    noise = np.asarray(gumbel(jnp.uint32(1), jnp.uint32(2), jnp.arange(200_000)))
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - np.euler_gamma) < 0.02 and abs(noise.var() - np.pi**2 / 6) < 0.05


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_seed_and_position_has_its_own_noise(implementation):
    logits = np.zeros((64, 1000), np.float32)
    for rows in (rows_of(64, position=0), rows_of(64, seed=0), rows_of(64, seed=2**32 - 1)):
        assert len(set(sampled(logits, rows, implementation))) > 50
    twice = [sampled(logits, rows_of(64), implementation) for _ in range(2)]
    np.testing.assert_array_equal(*twice)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_draw_takes_nothing_below_the_lowest(implementation):
    logits = no_rows_ruled(np.tile(np.arange(10.0), (50, 1)))
    key = jnp.stack([jnp.arange(50, dtype=jnp.uint32)] * 2, axis=1)
    ones = jnp.ones(50)
    assert set(np.asarray(draw(logits, 9 * ones, 100 * ones, key, implementation=implementation))) == {9}
    tokens = np.asarray(draw(logits, 7 * ones, 100 * ones, key, implementation=implementation))
    assert set(tokens) == {7, 8, 9}

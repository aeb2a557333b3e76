"""The model without an engine: every token of one sequence in one step, with attention written out."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from prefix_jax.models.llama import Llama


def plain_attend(q, k_slots, v_slots):
    """Causal attention where token t stands at position t and in slot t."""
    length, group = len(q), q.shape[1] // k_slots.shape[1]
    keys, values = (jnp.repeat(slots[:length], group, axis=1) for slots in (k_slots, v_slots))
    scores = jnp.einsum("thd,shd->hts", q, keys, precision="highest") / np.sqrt(q.shape[-1]).astype(q.dtype)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores.astype(jnp.float32), -jnp.inf)
    shares = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    return jnp.einsum("hts,shd->thd", shares, values, precision="highest")


def empty_store(model: Llama, num_slots: int):
    config = model.config
    slots = jnp.zeros((num_slots, config.num_kv_heads, config.head_dim), model.embed[...].dtype)
    return ((slots, slots),) * config.num_layers


@nnx.jit
def _forward(model: Llama, tokens):
    places = jnp.arange(len(tokens))
    hidden, _ = model(tokens, places, places, empty_store(model, len(tokens)), plain_attend)
    return model.logits(hidden)


def plain_logits(model: Llama, ids) -> np.ndarray:
    """float32 [len(ids), V]."""
    padded = np.zeros(-(-len(ids) // 64) * 64, np.int32)  # few shapes to compile; what comes after is not seen
    padded[: len(ids)] = ids
    return np.asarray(_forward(model, jnp.asarray(padded)))[: len(ids)]

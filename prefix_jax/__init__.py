"""prefix-jax: language models over many prompts that begin alike, each distinct prefix computed once."""

from prefix_jax.beam_search import BeamSearchParams as BeamSearchParams
from prefix_jax.engine import EngineConfig as EngineConfig
from prefix_jax.llm import LLM as LLM
from prefix_jax.prefix_pool import PinBudgetError as PinBudgetError
from prefix_jax.prefix_pool import Prefix as Prefix
from prefix_jax.request import RequestOutput as RequestOutput
from prefix_jax.request import SamplingParams as SamplingParams
from prefix_jax.sampler import LogitsContext as LogitsContext

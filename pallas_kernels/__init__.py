"""Attention through a page table, as tiles of query tokens over ranges of positions. Imports jax only; knows nothing of
requests, schedulers or caches."""

from pallas_kernels.hopper_attention import HopperConfig as HopperConfig
from pallas_kernels.paged_attention import BESIDE_OPTIONS as BESIDE_OPTIONS
from pallas_kernels.paged_attention import default_implementation as default_implementation
from pallas_kernels.paged_attention import is_compiled as is_compiled
from pallas_kernels.paged_attention import paged_attention as paged_attention
from pallas_kernels.tile_attention import Config as Config
from pallas_kernels.tile_attention import default_config as default_config
from pallas_kernels.tiles import Merge as Merge
from pallas_kernels.tiles import Scales as Scales
from pallas_kernels.tiles import Tiles as Tiles
from pallas_kernels.tuning import Tuning as Tuning
from pallas_kernels.tuning import tuning_for as tuning_for

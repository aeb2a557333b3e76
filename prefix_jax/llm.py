"""What a user holds: LLM(model).generate(prompts, sampling_params, prefix_pos)."""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from numbers import Integral
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from prefix_jax.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from prefix_jax.cache_report import CacheReport, make_report
from prefix_jax.checkpoint import eos_ids_of, read_json
from prefix_jax.commands import hold
from prefix_jax.engine import Engine
from prefix_jax.engine_config import EngineConfig
from prefix_jax.likelihood import Score, make_score, split_tokens
from prefix_jax.models.llama import LlamaConfig
from prefix_jax.models.split import AXIS
from prefix_jax.pauses import no_full_collections
from prefix_jax.prefix_cache import PageTable
from prefix_jax.prefix_pool import Encoded, Prefix, PrefixPool
from prefix_jax.prompts import Prompt, PromptReader
from prefix_jax.request import Request, RequestOutput, SamplingParams, refused_output
from prefix_jax.saved_prefixes import SavedPrefix, load_prefixes, save_prefixes
from prefix_jax.tokenizer import Tokenizer
from prefix_jax.weights import checkpoint_dtype, load_model, read_config

log = logging.getLogger(__name__)

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


class LLM:
    """A model with its tokenizer, ready to answer many prompts that begin alike.

    model: a Hugging Face folder, a GGUF file, or with load_format="dummy" a config (random weights, for benchmarks).
    tokenizer: a folder or a GGUF file; None: the model's own, which a dummy model need not have. dtype: "auto" is
    float32 on a CPU and the checkpoint's on a GPU. device: a JAX platform ("cpu", "gpu"); None: JAX's default.
    tensor_parallel_size: how many devices share the model; devices: which; None: the first of the platform.
    generation_config: the folder of the generation_config.json for get_default_sampling_params and more end tokens;
    "auto": the model's; "vllm": none. All else is EngineConfig's. Raises ValueError for what does not fit together,
    before any weight is read where possible.
    """

    def __init__(
        self,
        model: str | os.PathLike | LlamaConfig | Mapping[str, Any],
        *,
        tokenizer: str | os.PathLike | None = None,
        load_format: str = "auto",
        dtype: str = "auto",
        device: str | None = None,
        tensor_parallel_size: int = 1,
        devices: Sequence[jax.Device] | None = None,
        generation_config: str | os.PathLike = "auto",
        use_tqdm: bool = True,
        **engine: Any,
    ):
        config = EngineConfig(**engine)
        found = _find_devices(device, devices, tensor_parallel_size)
        self._mesh = Mesh(np.array(found), (AXIS,)) if tensor_parallel_size > 1 else None
        self._device = found[0] if found else None
        self._generation_config = _read_generation_config(generation_config, model)
        model_config = read_config(model, load_format).for_length(config.max_model_len)
        eos_ids = {*model_config.eos_ids, *eos_ids_of(self._generation_config)}
        self.model_config = replace(model_config, eos_ids=tuple(sorted(eos_ids)))
        self.tokenizer = _load_tokenizer(tokenizer, model, load_format)
        if self.tokenizer is not None:
            self.tokenizer.check_fits(self.model_config.vocab_size)
        with self._on_device():
            self.dtype = _resolve_dtype(dtype, model, load_format)
            options = {"dtype": self.dtype, "load_format": load_format, "seed": config.seed or 0, "mesh": self._mesh}
            weights = load_model(model, self.model_config, **options, use_tqdm=use_tqdm)
            self.engine = Engine(weights, self.tokenizer, config, use_tqdm=use_tqdm)
        self.reader = PromptReader(
            self.tokenizer,
            self.prefixes,
            vocab_size=self.model_config.vocab_size,
            max_model_len=self.engine.max_model_len,
            check_fits=lambda length: self.engine.scheduler.check_fits(length),
            check_rules=lambda sampling: self.engine.make_rules(sampling, 0),
            is_taken=lambda request_id: request_id in self._receivers,
            logits_processors=config.logits_processors,
        )
        self.prefixes.encode, self.prefixes.compute = self.reader.encode_prefix, self._compute_prefixes
        self.prefixes.write, self.prefixes.read = self._write_prefixes, self._read_prefixes
        # Of unfinished requests by their ids: the prompt's index in its call, and who gets the outputs.
        self._receivers: dict[str, tuple[int, Callable[[RequestOutput], None]]] = {}

    @property
    def prefixes(self) -> PrefixPool:
        """The declared prefixes: `add(content, name=…, parent=…)` gives a handle, `prefixes[name]` finds it again."""
        return self.engine.prefixes

    def get_default_sampling_params(self) -> SamplingParams:
        """What calls without sampling_params take: what the checkpoint's generation_config.json states, and else
        SamplingParams' own. Of a SamplingParams that is given every value counts, neutral ones and those left out
        too: nothing of the checkpoint's enters it. ValueError if what is stated is out of range."""
        try:
            return SamplingParams.from_generation_config(self._generation_config)
        except (ValueError, TypeError) as error:
            raise ValueError(f"generation_config.json: {error}") from error

    def cache_report(self) -> CacheReport:
        """What the cache holds, and what was expected of it and found; prints as a table."""
        engine = self.engine
        return engine.call(lambda: make_report(engine.cache, engine.prefixes, engine.scheduler.counts))

    @property
    def stats(self) -> dict[str, float]:
        """Counts since the start: tokens computed, cached and adopted, pages, steps, preemptions; warm-up seconds."""
        engine = self.engine
        return {
            **engine.scheduler.counts,
            "steps": engine.num_steps,
            "evicted_pages": engine.cache.num_evicted,
            "host_hit_pages": engine.cache.num_returned,
            "host_pages": len(engine.tier or ()),
            "pinned_pages": engine.cache.num_pinned,
            "num_pages": engine.runner.num_pages,
            "num_buckets": len(engine.batcher.buckets),
            "warmup_seconds": engine.warmup_seconds,
        }

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prefix_pos: int | Sequence[int | None] | None = None,
        *,
        prefix: Prefix | str | Sequence[Prefix | str | None] | None = None,
        cache_mode: str | Sequence[str] = "readwrite",
        use_tqdm: bool = True,
        on_error: Literal["raise", "return"] = "raise",
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """One result for each prompt, in the order of the prompts.

        prompts: strings, lists of token ids, or dicts with `prompt`, `prompt_token_ids` or `messages` (which go through
        the chat template, with `chat`'s `tools`, `chat_template` and so on where given), and optionally `request_id`,
        `cache_salt`, `priority` (an integer, 0 where it is not given; the higher starts sooner under that policy, and
        its pages are evicted later) and `ttl` (seconds after its end for which its pages are worth keeping) and
        `score_from` (the first token that prompt_logprobs are wanted of).
        sampling_params: one for all or one each; None: get_default_sampling_params().
        prefix_pos: the first so many tokens of a prompt (at most what it has) are a prefix to keep; one for all or one,
        or None, each. prefix: what stands before the prompt: a handle, the name of one, or text, which is then a prefix
        to keep; one for all or one each. cache_mode: "read" leaves nothing in the cache, "write" takes nothing from it,
        "off" neither. on_output is called with each result as it finishes. Several threads may generate at once.

        Everything is validated first. Bad prompts raise one ValueError that names each, and nothing is run; with
        on_error="return" the others run, and the bad ones have finish_reason "error" and say why in `error`.
        """
        if on_error not in ("raise", "return"):
            raise ValueError(f'on_error must be "raise" or "return", got {on_error!r}')
        if on_output is not None and not callable(on_output):
            raise TypeError(f"on_output must be a function that takes an output, got {on_output!r}")
        prompts = _as_list(prompts)
        requests, errors = self._read(prompts, sampling_params, prefix_pos, prefix, cache_mode, on_error=on_error)
        results = {index: _refused(prompts[index], error, index) for index, error in errors.items()}
        for index in sorted(results) if on_output else ():
            on_output(results[index])
        with tqdm(total=len(requests), desc="generating", unit="req", disable=not use_tqdm) as progress:
            for output in self._run(requests):
                results[output.index] = output
                progress.update()
                if on_output:
                    on_output(output)
        return [results[index] for index in range(len(prompts))]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prefix_pos: int | Sequence[int | None] | None = None,
        *,
        prefix: Prefix | str | Sequence[Prefix | str | None] | None = None,
        cache_mode: str | Sequence[str] = "readwrite",
    ) -> Iterator[RequestOutput]:
        """What is new in one answer at a time, as it is ready, for all prompts at once: `index` says which prompt's,
        `outputs` has the one answer that went on, and the last of a prompt is `finished`. All texts of an answer
        together are its text: only whole characters come, and nothing that may still become a stop string. Arguments
        are those of `generate`; ValueError comes now, before anything runs. Left early, it ends what is unfinished.
        """
        prompts = _as_list(prompts)
        requests, _ = self._read(prompts, sampling_params, prefix_pos, prefix, cache_mode, streams=True)
        return self._run(requests)

    def submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        give: Callable[[RequestOutput], None],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prefix_pos: int | Sequence[int | None] | None = None,
        *,
        prefix: Prefix | str | Sequence[Prefix | str | None] | None = None,
        cache_mode: str | Sequence[str] = "readwrite",
    ) -> list[str]:
        """For fronts of other kinds: queues what `stream` would run, from any thread, and returns the request ids.
        `give` gets what `stream` would yield, from the thread that steps: it must not wait, and if it raises, its
        request is dropped. Somebody has to call `step` while `engine.has_work`."""
        if not callable(give):
            raise TypeError(f"give must be a function that takes an output, got {give!r}")
        requests, _ = self._read(_as_list(prompts), sampling_params, prefix_pos, prefix, cache_mode, streams=True)
        self._add(requests, give, set())
        return [request.request_id for request in requests.values()]

    def step(self) -> None:
        """One step of the engine, whose outputs go to whoever waits for them; or up to 10 ms of waiting for another
        thread that steps."""
        with hold(self.engine.lock, 0.01) as held:
            if held and self.engine.has_work:
                with self._on_device(), no_full_collections():
                    self.engine.step()
            ready = self.engine.ready
            while held and ready:  # what an interrupt left there, too
                self._give(ready[0])
                ready.popleft()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or many, through a Jinja template: the checkpoint's, or `chat_template`. To go on
        with a last message of the assistant, say add_generation_prompt=False, continue_final_message=True. tools: JSON
        schemas that the template is given; chat_template_kwargs: what else it knows by name (enable_thinking, …).
        options: those of `generate`."""
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise ValueError(f"messages must be a conversation or a list of them, got {messages!r:.80}")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        how = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
        }
        return self.generate([{"messages": chat, **how} for chat in conversations], sampling_params, **options)

    def encode(self, texts: str | Sequence[str]) -> list[int] | list[list[int]]:
        """The token ids that `generate` makes of a text, or of each of several."""
        if self.tokenizer is None:
            raise ValueError("text needs a tokenizer, and this model was loaded without one")
        if isinstance(texts, str):
            return self.tokenizer.encode(texts)
        return [self.tokenizer.encode(text) for text in texts]

    def score(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        continuations: str | Sequence[int] | Sequence[str | Sequence[int]],
        *,
        use_tqdm: bool = True,
    ) -> list[Score]:
        """How likely each continuation is behind its prompt, or all behind one; what prompts share is computed once.
        See likelihood.split_tokens for where a text's prompt ends. ValueError names all that cannot be scored, before
        anything runs; RuntimeError if one is aborted."""
        prompts, continuations = _as_list(prompts), _as_list(continuations)
        if len(prompts) == 1:
            prompts = prompts * len(continuations)
        if len(prompts) != len(continuations):
            raise ValueError(f"{len(continuations)} continuations for {len(prompts)} prompts")
        asked, errors = [], {}
        for index, pair in enumerate(zip(prompts, continuations, strict=True)):
            try:
                head, tail = split_tokens(self.tokenizer, *pair)
                asked.append({"prompt_token_ids": head + tail, "score_from": len(head)})
            except (ValueError, TypeError) as error:
                errors[index] = str(error)
        if errors:
            raise ValueError(_describe(errors, len(prompts)))
        params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0, detokenize=False)
        return [make_score(output) for output in self.generate(asked, params, use_tqdm=use_tqdm)]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        prefix_pos: int | Sequence[int | None] | None = None,
        *,
        prefix: Prefix | str | Sequence[Prefix | str | None] | None = None,
        cache_mode: str | Sequence[str] = "readwrite",
    ) -> list[BeamSearchOutput]:
        """The likeliest answers to each prompt that a search of `beam_width` finds. Beams share their pages. Prompts
        and the arguments behind `params` are those of `generate`. ValueError for bad prompts, before anything runs."""
        requests, _ = self._read(_as_list(prompts), SamplingParams(), prefix_pos, prefix, cache_mode)
        return beam_search(self, list(requests.values()), params)

    def abort(self, request_id: str) -> None:
        """Ends a request that is running in another thread; its output so far is returned with reason "abort"."""
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, as outputs have it, got {request_id!r}")
        self.engine.abort(request_id)

    def delete_prefix(self, prefix: Prefix | str | Sequence[int], cache_salt: str | None = None) -> bool:
        """Takes back a declaration: a handle's, a name's, or for exactly these tokens (`prefix_pos`). Their pages are
        no longer kept. False if there is none, or it has lapsed."""
        if isinstance(prefix, Prefix):
            self.prefixes.check_own(prefix)
        elif not isinstance(prefix, str):
            try:
                prefix = array("i", prefix)
            except OverflowError:
                return False  # such tokens are in no prefix
        return self.engine.call(lambda: self.prefixes.delete(prefix, cache_salt))

    def load_weights(self, model: str | os.PathLike) -> None:
        """Takes the weights of another checkpoint of the same model, between two steps. Cached pages of the former
        weights never match again; declared prefixes stay and are computed anew. ValueError if shapes differ."""
        config = read_config(model, "auto").for_length(self.engine.config.max_model_len)
        mine = self.model_config
        told = ("bos_id", "eos_ids")  # what the tokenizer and requests were told stays
        names = [field.name for field in fields(config) if getattr(mine, field.name) != getattr(config, field.name)]
        if names := [name for name in names if name not in told]:
            raise ValueError(f"{model} is another model: {', '.join(names)} differ")
        with self._on_device():
            weights = load_model(model, config, dtype=self.dtype, mesh=self._mesh)
        self._call(lambda: self.engine.set_params(weights))

    def reset_prefix_cache(self) -> None:
        """Forgets all declared prefixes and every cached page that no running request reads."""
        self.engine.call(lambda: (self.prefixes.clear(), self.engine.cache.clear()))

    # ------------------------------------------------------------------------------------------------------------------

    def _read(
        self,
        prompts: list[Prompt],
        sampling_params,
        prefix_pos,
        prefix,
        cache_mode,
        *,
        streams: bool = False,
        on_error: str = "raise",
    ) -> tuple[dict[int, Request], dict[int, str]]:
        """The good requests by index, and with on_error="return" what is wrong with the others; else ValueError."""
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = _one_each("sampling_params", params, len(prompts), SamplingParams)
        positions = _one_each("prefix_pos", prefix_pos, len(prompts), (int, np.integer, type(None)))
        positions = [None if position is None else int(position) for position in positions]
        before = _one_each("prefix", prefix, len(prompts), (Prefix, str, type(None)))
        modes = _one_each("cache_mode", cache_mode, len(prompts), str)
        requests, errors = self.reader.read(prompts, params, positions, before, modes, streams=streams)
        if errors and on_error == "raise":
            raise ValueError(_describe(errors, len(prompts)))
        return requests, errors

    def _run(self, requests: dict[int, Request]) -> Iterator[RequestOutput]:
        """Queues the requests, and gives each output as it is ready. ValueError now for an id that is in use."""
        outputs = self._outputs(requests)
        next(outputs)  # they are queued, and from now on taken back by whatever ends it
        return outputs

    def _outputs(self, requests: dict[int, Request]) -> Iterator[RequestOutput | None]:
        """None once they are queued, then each output. Left early, it takes back what is unfinished before the next
        step; it never steps then, since garbage collection may end it anywhere, also inside a step."""
        inbox: SimpleQueue[RequestOutput] = SimpleQueue()
        open_ids: set[str] = set()
        try:
            self._add(requests, inbox.put, open_ids)
            yield None
            while open_ids:
                self.step()
                while not inbox.empty():
                    output = inbox.get()
                    if output.finished:
                        open_ids.discard(output.request_id)
                    yield output
        finally:
            for request_id in open_ids:
                self._receivers.pop(request_id, None)
            if open_ids:
                self.engine.drop(open_ids)

    def _add(self, requests: dict[int, Request], give: Callable[[RequestOutput], None], open_ids: set[str]) -> None:
        """Queues them; `open_ids` has their ids from the moment on in which they are queued."""

        def add() -> None:
            self.engine.add_batch(list(requests.values()))
            for index, request in requests.items():
                self._receivers[request.request_id] = index, give
                open_ids.add(request.request_id)

        self._call(add)

    def _give(self, output: RequestOutput) -> None:
        index, give = self._receivers.get(output.request_id, (0, None))
        is_last = output.finished
        try:
            if give is not None:
                give(replace(output, index=index))
        except Exception:  # of somebody else's code, which may not stop what others wait for
            log.exception("what gets the outputs of request %s failed, and the request ends", output.request_id)
            self.engine.drop([output.request_id])
            is_last = True
        if is_last:
            self._receivers.pop(output.request_id, None)

    def _call(self, do: Callable[[], Any]) -> Any:
        """Between two steps, in whatever thread, on this engine's device."""

        def on_device() -> Any:
            with self._on_device():
                return do()

        return self.engine.call(on_device)

    def _compute_prefixes(self, prefixes: Iterable[Prefix]) -> None:
        """Runs each as a prompt, so that its pages are there."""
        params, new_id = SamplingParams(temperature=0, max_tokens=1), self.reader.new_id
        requests = [
            Request(new_id("warm"), tuple(p.tokens), params, p.num_tokens + 1, cache_salt=p.salt) for p in prefixes
        ]
        for output in self._run(dict(enumerate(requests))):
            if (reason := output.outputs[0].finish_reason) in ("abort", "error"):
                raise RuntimeError(f"a prefix was not computed: {output.error or reason}")

    def _write_prefixes(self, path: str | os.PathLike, prefixes: Sequence[Prefix]) -> None:
        place = {prefix: index for index, prefix in enumerate(prefixes)}
        saved = [SavedPrefix(p.name, p.tokens, place.get(p.parent), p.salt, asdict(p.content)) for p in prefixes]
        self._call(lambda: save_prefixes(Path(path), self.engine, saved))

    def _read_prefixes(self, path: str | os.PathLike) -> list[Prefix]:
        handles: list[Prefix] = []
        levels: list[tuple[Prefix, int]] = []

        def on_loaded(saved: SavedPrefix, table: PageTable) -> None:
            content = Encoded(**saved.content)
            prefix = Prefix(self.prefixes, saved.tokens, saved.salt, saved.name, content=content)
            handles.append(self.prefixes.restore(prefix, table.nodes))
            if handles[-1] is prefix and saved.parent is not None:  # else it was there, with a parent or without
                levels.append((prefix, saved.parent))

        def load() -> None:
            load_prefixes(Path(path), self.engine, on_loaded)
            for prefix, parent in levels:
                prefix.parent = handles[parent]

        self._call(load)
        return handles

    def _on_device(self):
        return jax.default_device(self._device) if self._device else nullcontext()


def _load_tokenizer(tokenizer, model, load_format: str) -> Tokenizer | None:
    if tokenizer is not None:
        return Tokenizer.load(tokenizer)
    if load_format != "dummy":
        return Tokenizer.load(model)
    return None


def _read_generation_config(source: str | os.PathLike, model) -> Mapping[str, Any]:
    if source == "vllm" or (source == "auto" and not isinstance(model, str | os.PathLike)):
        return {}
    path = Path(model if source == "auto" else source) / "generation_config.json"
    return read_json(path) if path.exists() or source != "auto" else {}


def _find_devices(platform: str | None, devices: Sequence[jax.Device] | None, num: int) -> list[jax.Device]:
    """Those of an engine; none where JAX's default will do."""
    if isinstance(num, bool) or not isinstance(num, int) or num < 1:
        raise ValueError(f"tensor_parallel_size must be a positive integer, got {num!r}")
    if devices is not None:
        if not isinstance(devices, Sequence) or not all(isinstance(one, jax.Device) for one in devices):
            raise ValueError(f"devices must be a list of jax.Device, got {devices!r}")
        if len(devices) != num or len(set(devices)) != num:
            raise ValueError(f"devices must be {num} different ones, as tensor_parallel_size says, got {devices}")
    elif platform is None and num == 1:
        return []
    try:
        known = jax.local_devices(backend=platform)
    except RuntimeError as error:
        raise ValueError(f"no device {platform!r}: JAX has {', '.join(map(str, jax.devices()))}") from error
    if devices is not None:
        if platform is not None and not set(devices) <= set(known):
            raise ValueError(f"device is {platform!r}, but devices are {devices}")
        return list(devices)
    if num > len(known):
        raise ValueError(f"tensor_parallel_size is {num}, but JAX has {len(known)} devices: {known}")
    return known[:num]


def _resolve_dtype(dtype: str, model, load_format: str) -> jnp.dtype:
    if dtype == "auto":
        on_cpu = (jax.config.jax_default_device or jax.devices()[0]).platform == "cpu"
        return jnp.dtype(jnp.float32) if on_cpu else jnp.dtype(checkpoint_dtype(model, load_format))
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be auto, {', '.join(DTYPES)}, got {dtype!r}")
    return jnp.dtype(DTYPES[dtype])


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt becomes a list of one; a flat list of integers is a single prompt."""
    if isinstance(prompts, (str, bytes, bytearray, Mapping)):
        return [prompts]  # of these, bytes are refused one by one
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts  # of NumPy or JAX
    if not isinstance(prompts, Iterable):
        raise TypeError(f"prompts must be text, token ids, a dict, or a list of these, got {prompts!r:.80}")
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], Integral) else prompts


def _one_each(name: str, value: Any, count: int, kind: type | tuple[type, ...]) -> list:
    """A value for all, or a list of one for each; ValueError or TypeError shows what was got."""
    values = list(value) if isinstance(value, (list, tuple)) else [value] * count
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} prompts")
    for index, entry in enumerate(values):
        if isinstance(entry, bool) or not isinstance(entry, kind):
            raise TypeError(f"{name}[{index}] is not usable: {entry!r}")
    return values


def _describe(errors: dict[int, str], count: int) -> str:
    lines = [f"  prompts[{index}]: {error}" for index, error in errors.items()]
    return "\n".join([f"{len(errors)} of {count} prompts cannot run; nothing was run:", *lines])


def _refused(prompt: Prompt, error: str, index: int) -> RequestOutput:
    is_dict = isinstance(prompt, Mapping)
    text = prompt if isinstance(prompt, str) else prompt.get("prompt") if is_dict else None
    request_id = str(prompt.get("request_id", "")) if is_dict else ""
    return replace(refused_output(request_id, text, error), index=index)

"""Hugging Face transformers as a rollout engine: slow, for machines without vLLM.

Prompts are processed one at a time, with one prefill each, and the completions of a group are
sampled together. Nothing is padded, and completions do not depend on other prompts, bit for bit.
Does not depend on trainers or rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any, Literal

import torch
from torch import Tensor

from trigon.errors import EngineError, ModelError
from trigon.metrics import Metrics
from trigon.models.load import Processors, load_model
from trigon.models.policy import Policy
from trigon.models.positions import completion_positions, positions_of, prompt_positions
from trigon.models.routing import ExpertRecorder
from trigon.models.tiles import pad_patches, patch_positions, to_padded_images, to_tiles
from trigon.rollout.episode_settings import EpisodeSettings
from trigon.rollout.episodes import Episodes
from trigon.rollout.protocol import OnGroup, Until, require_awake, require_local_weights
from trigon.rollout.turns import BegunTurn, SampledTurn, TurnRequest
from trigon.system.trace import DecodeTracer
from trigon.types import Completion, Prompt, SamplingParams, Vision, WeightsHandle


class TransformersEngine:
    """Samples with its own copy of the model. Satisfies RolloutEngine."""

    num_replicas = 1

    def __init__(
        self,
        *,
        model_path: str,
        processors: Processors,
        device: torch.device | str,
        dtype: torch.dtype,
        max_model_len: int,
        trust_remote_code: bool,
        override_config: Mapping[str, Any],
        skip_special_tokens: bool,
        records_experts: bool = False,
        episodes: EpisodeSettings | None = None,
        tracer: DecodeTracer | None = None,
    ) -> None:
        """Load the model, on the CPU until awake().

        Args:
            device: where completions are sampled.
            max_model_len: most tokens of a prompt and its completion together.
            skip_special_tokens: leave special tokens out of Completion.text.
            records_experts: record Completion.routed_experts, of an MoE model.
            episodes: None: completions of one turn. Each later turn computes all tokens before it.
            tracer: traces the decode steps; None: no traces.
        """
        self._episodes = Episodes(
            episodes,
            tokenizer=processors.tokenizer,
            skip_special_tokens=skip_special_tokens,
            stop_token_ids=processors.stop_token_ids,
            turn_by_turn=torch.device(device).type == "cpu",
            tracer=tracer,
        )
        self._processors = processors
        self._device = torch.device(device)
        self._max_model_len = max_model_len
        self._model = load_model(
            model_path, dtype=dtype, device="cpu", trust_remote_code=trust_remote_code, override_config=override_config
        )
        self._model.requires_grad_(False)
        # Trigon's own attention is for packed rows; sampling needs causal attention with a KV
        # cache.
        processors.family.language_model(self._model).set_attn_implementation("sdpa")
        if processors.family.vision_input == "images":  # whose tower does not compute their boundaries itself
            tower: Any = processors.family.vision_tower(self._model)
            tower.set_attn_implementation("sdpa")
        self._recorder = ExpertRecorder(self._model, processors.family) if records_experts else None
        self._version: int | None = None
        self._awake = False

    @contextmanager
    def awake(self, weights: WeightsHandle, *, version: int) -> Iterator[None]:
        """See RolloutEngine.

        Raises: EngineError, with the old weights kept, if a tensor is missing, unexpected or has
        another shape.
        """
        local = require_local_weights(weights)
        self._model.to(self._device)
        if version != self._version:
            self._version = None
            policy = Policy(self._model, self._processors.family, temperature=1.0, banned_token_ids=())
            try:
                policy.load_named_weights(dict(local.read()))
            except ModelError as error:
                raise EngineError(
                    f"The rollout engine could not load the weights of policy version {version}. {error}"
                ) from error
            self._version = version
        was_awake, self._awake = self._awake, True
        if not was_awake:
            self._episodes.wake()
        try:
            yield
        finally:
            self._awake = was_awake
            if not was_awake:
                self._model.to("cpu")

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        until: Until | None = None,
        on_progress: Callable[[int | None], None] | None = None,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """See RolloutEngine.

        Raises: EngineError also for a prompt that with sampling.max_tokens exceeds max_model_len.
        """
        require_awake(self._awake)
        unprocessed, prompts = prompts, self._episodes.with_pixels(prompts)
        for prompt in prompts:
            needed = len(prompt.token_ids) + sampling.max_tokens
            if needed > self._max_model_len:
                raise EngineError(
                    f"{prompt.prompt_id}: its {len(prompt.token_ids)} tokens and a completion of up to "
                    f"{sampling.max_tokens} need {needed} tokens, but worker.rollout.max_model_len is "
                    f"{self._max_model_len}. Raise it, or shorten either."
                )
        assert self._version is not None
        turns = _TransformersTurns(lambda batch: self._sample(batch, sampling))
        return self._episodes.run(
            turns,
            prompts,
            sampling,
            unprocessed=unprocessed,
            policy_version=self._version,
            on_progress=on_progress,
            on_group=on_group,
            until=until,
        )

    def pop_metrics(self) -> Metrics:
        """See RolloutEngine. No request is ever submitted again."""
        return self._episodes.pop_metrics()

    def close(self) -> None:
        """See RolloutEngine."""
        self._episodes.stop()
        self._awake = False
        del self._model

    def _sample(self, batch: _Batch, sampling: SamplingParams) -> Iterator[list[tuple[int, SampledTurn]]]:
        """Sample turns of the same context together, one token of each at a time.

        Yields after each token the turns that have ended with it, by their index in the batch.
        """
        from transformers import DynamicCache

        first = batch.requests[0]
        sampling = first.sampling(sampling)
        draws = torch.stack([_uniforms(request.seed, first.max_tokens) for request in batch.requests]).to(self._device)
        stop = set(() if sampling.ignore_eos else self._processors.stop_token_ids)
        ids = torch.tensor(first.token_ids)
        positions = self._positions(first)
        completion_position_ids = completion_positions(positions, first.max_tokens)

        cache = DynamicCache(config=self._model.config.get_text_config())
        logits = self._forward(ids[None], positions, cache, first.visions)[:, -1].expand(len(batch.requests), -1)
        batch.experts_before = None if self._recorder is None else self._recorder.take()
        cache.reorder_cache(torch.zeros(len(batch.requests), dtype=torch.int64, device=self._device))  # copies of row 0
        for index in range(first.max_tokens):
            token, logprob = draw(logits, draws[:, index], sampling, banned_token_ids=self._processors.banned_token_ids)
            batch.tokens.append(token)
            batch.logprobs.append(logprob)
            stopped = {row for row, token_id in enumerate(token.tolist()) if token_id in stop}
            stopped |= set(self._find_stopped(batch.tokens, first.stop) if first.stop else ())
            ended = sorted(batch.running if index + 1 == first.max_tokens else batch.running & stopped)
            batch.running -= set(ended)
            yield [(row, self._turn(batch, row, "stop" if row in stopped else "length")) for row in ended]
            if not batch.running:
                return
            logits = self._forward(token[:, None], completion_position_ids[:, index : index + 1], cache, ())[:, -1]
            if self._recorder is not None:
                batch.experts.append(self._recorder.take())

    def _find_stopped(self, tokens: Sequence[Tensor], stop: Sequence[str]) -> list[int]:
        """Return the rows whose last tokens have one of the texts. tokens: each [B]."""
        # A token has at least one character of these texts.
        window = torch.stack(list(tokens[-max(map(len, stop)) :]), 1).tolist()
        texts = [self._episodes.decode(token_ids) for token_ids in window]
        return [row for row, text in enumerate(texts) if any(end in text for end in stop)]

    def _positions(self, request: TurnRequest) -> Tensor:
        """Return the positions of all tokens before a turn, [A, T] as in _forward."""
        family, hf_config, prompt = self._processors.family, self._model.config, request.prompt
        positions = positions_of(family, hf_config)(prompt)
        rest = request.token_ids[len(prompt.token_ids) :]
        if not rest:
            return positions
        grids = [vision.grid_thw for vision in request.visions if vision is not prompt.vision]
        # The positions of what follows a prompt begin after its largest, images included.
        after = prompt_positions(torch.tensor(rest), torch.cat(grids) if grids else None, family, hf_config)
        return torch.cat([positions, positions.max() + 1 + after], 1)

    def _forward(self, ids: Tensor, positions: Tensor, cache: Any, visions: Sequence[Vision]) -> Tensor:
        """Return the logits of the last token, [B, 1, V].

        Args:
            ids: [B, T] int64.
            positions: [A, T] int64, the same in each row; A is 3 with m-RoPE, else 1.
            visions: the images or videos whose placeholders are in ids, in order.
        """
        media, family = self._media(visions), self._processors.family
        if visions and family.image_layers != "none":  # without it transformers attends causally
            is_image = ids == family.image_token_id(self._model.config)
            name = "mm_token_type_ids" if family.vision_input == "pooled" else "token_type_ids"
            media[name] = is_image.to(self._device, torch.int64)
        rows = positions[:, None].expand(-1, len(ids), -1).to(self._device)  # [A, B, T]
        output = self._model(
            input_ids=ids.to(self._device),
            position_ids=rows if family.rope == "mrope" else rows[0],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **media,
        )
        logits: Tensor = output.logits
        return logits

    def _media(self, visions: Sequence[Vision]) -> dict[str, Tensor]:
        """Return the arguments of the model for images and videos."""
        family, patch_size = self._processors.family, self._processors.family.patch_size
        media: dict[str, Tensor] = {}
        for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            of_kind = [vision for vision in visions if vision.kind == kind]
            if not of_kind:
                continue
            pixel_values = torch.cat([vision.pixel_values for vision in of_kind])
            grid_thw = torch.cat([vision.grid_thw for vision in of_kind])
            if family.takes_patches:
                media[f"{kind}_grid_thw"] = grid_thw.to(self._device)
            elif family.tiles:
                pixel_values = to_tiles(pixel_values, grid_thw, patch_size(self._model.config))
                if family.image_layout is not None:  # Idefics 3: [batch, tiles, ...]
                    pixel_values = pixel_values[None]
                if family.tile_assembly is not None:
                    sizes = [size for vision in of_kind for size in vision.original_sizes]
                    media["image_sizes"] = torch.tensor(sizes).flip(1)  # (height, width)
            elif family.vision_input == "pooled":
                pixel_values = pad_patches(pixel_values, grid_thw)
                media["image_position_ids"] = patch_positions(grid_thw).to(self._device)
            else:
                pixel_values = to_padded_images(pixel_values, grid_thw, patch_size(self._model.config))
                media["image_sizes"] = grid_thw[:, 1:] * patch_size(self._model.config)
            media[name] = pixel_values.to(self._device, self._model.dtype)
        return media

    def _turn(self, batch: _Batch, row: int, finish_reason: Literal["stop", "length"]) -> SampledTurn:
        """Return the turn of a row that has ended with the last token."""
        begun = batch.so_far(row)
        text = self._episodes.to_text(batch.requests[row].begun + begun.token_ids)
        return SampledTurn(begun.token_ids, begun.logprobs, text, finish_reason, batch.experts_of(row))


class _Batch:
    """Turns of the same context, all of them greedy or none, that are sampled together.

    tokens, logprobs: what was sampled so far, each [B]. running: rows that have not ended.
    experts_before: [T, layers, k], the experts of the context; None if they are not recorded.
    experts: the experts of all sampled tokens but the last, each [B, layers, k].
    """

    def __init__(self, requests: Sequence[TurnRequest]) -> None:
        self.requests = requests
        self.tokens: list[Tensor] = []
        self.logprobs: list[Tensor] = []
        self.experts_before: Tensor | None = None
        self.experts: list[Tensor] = []
        self.running = set(range(len(requests)))

    def so_far(self, row: int) -> BegunTurn:
        """Return what is sampled of a row that is running, or has ended with the last token."""
        if not self.tokens:
            return BegunTurn((), ())
        token_ids, logprobs = (torch.stack(each)[:, row].tolist() for each in (self.tokens, self.logprobs))
        return BegunTurn(tuple(token_ids), tuple(logprobs))

    def experts_of(self, row: int) -> Tensor | None:
        """Return SampledTurn.routed_experts of a row that has ended with the last token."""
        if self.experts_before is None:
            return None
        before = self.experts_before[self.requests[row].num_recorded :]
        return torch.cat([before, *(each[row : row + 1] for each in self.experts)])


class _TransformersTurns:
    """Satisfies TurnEngine: samples the turns of one context at a time, one token in each step."""

    def __init__(self, sample: Callable[[_Batch], Iterator[list[tuple[int, SampledTurn]]]]) -> None:
        self._sample = sample
        self._pending: list[TurnRequest] = []
        self._batch = _Batch(())
        self._sampling: Iterator[list[tuple[int, SampledTurn]]] = iter(())  # of the batch

    def submit(self, request: TurnRequest) -> None:
        """See TurnEngine."""
        self._pending.append(request)

    def is_decoding(self) -> bool:
        """See TurnEngine."""
        return bool(self._batch.running)

    def step(self) -> list[tuple[str, SampledTurn | None]]:
        """See TurnEngine."""
        if not self._batch.running:
            first = self._pending[0]
            together = [each.greedy == first.greedy and each.same_context(first) for each in self._pending]
            self._batch = _Batch(list(compress(self._pending, together)))
            self._pending = [each for each, is_in_batch in zip(self._pending, together, strict=True) if not is_in_batch]
            self._sampling = self._sample(self._batch)
        return [(self._batch.requests[row].name, turn) for row, turn in next(self._sampling)]

    def stop(self) -> list[tuple[str, BegunTurn]]:
        """See TurnEngine."""
        batch = self._batch
        stopped = [(batch.requests[row].name, batch.so_far(row)) for row in sorted(batch.running)]
        stopped += [(name, BegunTurn((), ())) for name in self.stop_waiting()]
        self.abort()
        return stopped

    def stop_waiting(self) -> list[str]:
        """See TurnEngine."""
        waiting = [request.name for request in self._pending]
        self._pending.clear()
        return waiting

    def abort(self) -> None:
        """See TurnEngine."""
        self._pending.clear()
        self._batch = _Batch(())


def draw(
    logits: Tensor, uniforms: Tensor, sampling: SamplingParams, *, banned_token_ids: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Draw one token from each row, as a function of the arguments alone.

    Bans come first, then temperature, then top-k, then top-p of what remains, as in vLLM. All
    tokens equal to the k-th are kept.
    Args: logits: [B, V] of any dtype. uniforms: [B] float64 in [0, 1).
    Returns: tokens [B] int64 and their log-probabilities [B] float32, 0 for greedy decoding.
    """
    logits = logits.float()
    if banned_token_ids:
        logits = logits.index_fill(1, torch.tensor(banned_token_ids, device=logits.device), -torch.inf)
    if sampling.temperature == 0:
        tokens = logits.argmax(1)
        return tokens, torch.zeros_like(tokens, dtype=torch.float32)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[1]:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k, 1).values[:, -1:], -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(1, descending=True)
        probability = ordered.softmax(1)
        before = probability.cumsum(1) - probability  # exactly 0 for the first token, which is always kept
        logits = logits.scatter(1, order, ordered.masked_fill(before >= sampling.top_p, -torch.inf))
    cumulative = logits.double().softmax(1).cumsum(1)
    # The last entry is then exactly 1, above any uniform number; a token of probability 0 has an
    # empty interval.
    tokens = torch.searchsorted(cumulative / cumulative[:, -1:], uniforms[:, None].contiguous(), right=True)
    return tokens[:, 0], logits.log_softmax(1).gather(1, tokens)[:, 0]


def _uniforms(seed: int, count: int) -> Tensor:
    """Return [count] float64 in [0, 1), a function of the seed alone."""
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

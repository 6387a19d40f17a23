"""Runs the episodes of a call of generate over an engine that samples turns.

    prompt | observation | turn | observation | turn |
           |<------------- completion -------------->|

The environment answers a turn with the next observation; the first one is optional.
Without an environment an episode is one turn. The tokens of an episode only grow: what was sampled
is never decoded and tokenized again. All engines use this code (turns.py). It does not depend on
what an environment is, or how a chat template is read.

A call with `until` may stop before an episode has ended. The episode is then kept here with its
environment, which lives on, and the next call with `until` continues it: the running turn is
submitted again with the tokens that it has, and an environment that was asked may answer in the
meantime. Episodes that this call does not continue are stopped. Calls without `until`, such as
validations, may come in between.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from trigon.config.names import ToolFormat
from trigon.data.turns import TurnTemplate, TurnTokens
from trigon.environments.calls import end_of_calls, invented_replies
from trigon.environments.protocol import Observation
from trigon.errors import DataError
from trigon.metrics import Mean, Metric, Metrics, Sum, mean_of, merge
from trigon.rollout.episode_settings import EpisodeSettings, Outcome
from trigon.rollout.episode_state import Episode, Groups, sample_seed
from trigon.rollout.protocol import OnGroup, Until
from trigon.rollout.turns import SampledTurn, TurnEngine
from trigon.system.trace import DecodeTrace, DecodeTracer
from trigon.types import Completion, FinishReason, Prompt, SamplingParams, Vision

POLL_SECONDS = 1.0
"""How long the environments are waited for before progress is reported."""

_NUM_LOADERS = 4
"""Threads that process the images of observations while the engine samples."""


class Episodes:
    """Runs the completions of one engine."""

    def __init__(
        self,
        settings: EpisodeSettings | None,
        *,
        decode: Callable[[Sequence[int]], str],
        to_text: Callable[[Sequence[int]], str],
        stop_token_ids: Sequence[int],
        on_cpu: bool,
        tracer: DecodeTracer | None = None,
    ) -> None:
        """Keep the settings.

        Args:
            settings: None: a completion is one turn, without an environment.
            decode: returns tokens as text, special tokens included, which may mark calls of tools.
            to_text: returns tokens as SampledTurn.text.
            stop_token_ids: end a turn. The first one is the only token of an episode that failed
                before anything was sampled.
            on_cpu: whether the engine samples on the CPU; see EpisodeSettings.turn_by_turn.
            tracer: traces the engine's decode steps; None: no traces.
        """
        self._settings = settings
        self.tracer = DecodeTracer(Path(), rank=None, steps=()) if tracer is None else tracer
        self._media = None if settings is None else settings.media
        self._decode, self._to_text = decode, to_text
        self._stop_token_ids = tuple(stop_token_ids)
        self._turn_by_turn = on_cpu
        if settings is not None and settings.turn_by_turn is not None:
            self._turn_by_turn = settings.turn_by_turn
        self._numbers = itertools.count()
        self._kept: dict[tuple[str, int], Episode] = {}  # between calls, by prompt id and sample
        self._metrics: Metrics = {}  # since the last pop_metrics

    def wake(self) -> None:
        """Begin a step, or a validation. Engines call this when they wake."""
        if self._media is not None:
            self._media.start_step()

    def with_pixels(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts, with pixel values in place of files if there are settings.

        Raises: DataError if a file cannot be decoded.
        """
        return list(prompts) if self._settings is None else self._settings.load_prompts(prompts)

    def run(
        self,
        turns: TurnEngine,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        unprocessed: Sequence[Prompt],
        policy_version: int,
        on_progress: Callable[[int | None], None] | None = None,
        on_group: OnGroup | None = None,
        until: Until | None = None,
    ) -> list[list[Completion]]:
        """Return what RolloutEngine.generate returns.

        An unfinished completion that an earlier call has begun continues its episode. If that is
        not kept here, a completion of one turn continues from its tokens, and an episode begins
        again from its start, which is counted.

        An episode whose environment fails, or whose observation cannot be shown to the model, has a
        completion with an error. The caller aborts what is still sampled if this raises.
        Args:
            prompts: the prompts with pixel values, see with_pixels.
            unprocessed: the arguments of with_pixels.
        Raises: as turns.step, on_progress and on_group do, and as the environments do for what is
        not the failure of one episode.
        """
        settings = None if sampling.one_turn else self._settings
        groups = Groups(len(prompts), sampling.num_completions)
        begun = _begun(until, groups)
        kept = {} if until is None or settings is None else self._take_kept(settings, prompts, begun)
        new, continued, num_begun_again = [], [], 0
        for prompt_index, prompt in enumerate(prompts):
            for sample in range(sampling.num_completions):
                so_far = begun.get((prompt_index, sample))
                if so_far is not None and not so_far.is_unfinished:
                    continue
                episode = kept.get((prompt.prompt_id, sample))
                if episode is not None:
                    episode.enter(prompt_index, prompt, unprocessed[prompt_index])
                    continued.append(episode)
                    continue
                episode = Episode(
                    number=next(self._numbers),
                    prompt_index=prompt_index,
                    sample=sample,
                    prompt=prompt,
                    unprocessed=unprocessed[prompt_index],
                    seed=sample_seed(sampling.seed, draw=prompt.draw, prompt_id=prompt.prompt_id, sample=sample),
                    greedy=sample == sampling.n,  # the baseline
                )
                if so_far is not None and settings is None:
                    episode.begin_with(so_far)
                elif so_far is not None:
                    num_begun_again += bool(so_far.token_ids)
                new.append(episode)
        texts = (self._decode, self._to_text)
        rules = _Rules(sampling, self._turn_by_turn, *texts, self._stop_token_ids, policy_version)
        others = {episode.number: episode for episode in self._kept.values()}
        with (
            closing(_Run(settings, turns, new, continued, others, groups, rules)) as run,
            self.tracer.call(newest_draw(prompts)) as trace,
        ):
            run.finish(trace, on_progress, on_group, until)
            self._kept |= {(episode.prompt.prompt_id, episode.sample): episode for episode in run.pop_left()}
        # Not of a call that failed, whose episodes all run again.
        again: Metrics = {"rollout/episodes_begun_again": Sum(float(num_begun_again))} if settings is not None else {}
        self._metrics = merge(self._metrics, run.metrics(), again)
        return [groups.completions(prompt_index) for prompt_index in range(len(prompts))]

    def _take_kept(
        self, settings: EpisodeSettings, prompts: Sequence[Prompt], begun: Mapping[tuple[int, int], Completion]
    ) -> dict[tuple[str, int], Episode]:
        """Return the kept episodes that a call continues, and stop the others; keep none."""
        names = {
            (prompts[prompt_index].prompt_id, sample)
            for (prompt_index, sample), completion in begun.items()
            if completion.is_unfinished
        }
        taken = {name: episode for name, episode in self._kept.items() if name in names}
        for name, episode in self._kept.items():
            if name not in taken:
                settings.environments.stop(episode.number)
        self._kept = {}
        return taken

    def stop(self) -> None:
        """Stop the episodes that are kept between calls, which then begin again."""
        for episode in self._kept.values():
            assert self._settings is not None
            self._settings.environments.stop(episode.number)
        self._kept = {}

    def pop_metrics(self) -> Metrics:
        """Return the counts of episodes and the times of environments since the last call.

        They include the counts of EpisodeSettings.media. There are none without settings.
        """
        metrics, self._metrics = self._metrics, {}
        return metrics if self._media is None else {**metrics, **self._media.pop_metrics()}


@dataclass(frozen=True, slots=True)
class _Rules:
    """What is the same for all episodes of a call; see Episodes."""

    sampling: SamplingParams
    turn_by_turn: bool
    decode: Callable[[Sequence[int]], str]
    to_text: Callable[[Sequence[int]], str]
    stop_token_ids: tuple[int, ...]
    policy_version: int


@dataclass(slots=True, eq=False)
class _Loading:
    """An observation whose images are being processed."""

    episode: Episode
    tokens: TurnTokens
    vision: Future[Vision]


class _Run:
    """The episodes of one call. Each is in one of the collections below, or has ended."""

    def __init__(
        self,
        settings: EpisodeSettings | None,
        turns: TurnEngine,
        new: Sequence[Episode],
        continued: Sequence[Episode],
        others: Mapping[int, Episode],
        groups: Groups,
        rules: _Rules,
    ) -> None:
        """Sort the episodes.

        Args:
            new: episodes without an environment.
            continued: episodes that an earlier call has left.
            others: episodes that stay as they are, by number; they receive their answers.
        """
        self._settings = settings
        self._turns = turns
        self._groups = groups
        self._others = others
        self._rules = rules
        self._not_begun = deque(new)
        # For an environment, by number.
        self._waiting = {each.number: each for each in continued if each.is_waiting and each.outcome is None}
        self._answers = [(each, each.outcome) for each in continued if each.outcome is not None]  # to be applied
        self._loading: list[_Loading] = []
        self._ready = [each for each in continued if not each.is_waiting]  # for the next turn
        self._sampling: dict[str, Episode] = {}  # by the name of the request
        self._left: list[Episode] = []  # for another call
        self._ended: list[int] = []  # prompt indices since the last report, one for each episode
        self._num_complete = 0  # prompts
        self._loaders: Executor | None = None if settings is None else ThreadPoolExecutor(_NUM_LOADERS, "observations")
        self._num_turns: list[int] = []  # of episodes that have ended without an error
        self._num_cut = 0
        self._num_failed = 0
        self._num_dropped = 0  # tokens that were sampled after calls of tools
        tool_format = None if settings is None or rules.sampling.ignore_eos else settings.tool_format
        self._stop_texts = () if tool_format is None else invented_replies(tool_format)
        self._answer_seconds: list[float] = []
        self._idle_seconds = 0.0
        self._started = time.perf_counter()

    def finish(
        self,
        trace: DecodeTrace,
        on_progress: Callable[[int | None], None] | None,
        on_group: OnGroup | None,
        until: Until | None = None,
    ) -> None:
        """Run all episodes to their end, or until enough have ended."""
        self._load_observed()
        self._report_groups(range(self._groups.num_prompts), on_group)  # that earlier calls have ended
        # Turn by turn, when a call stops does not depend on how long environments take.
        waits_for_all = until is not None and self._settings is not None and self._rules.turn_by_turn
        drained = False
        while self._not_begun or self._sampling or self._ready or not self._is_between_turns:
            interrupted = None if until is None else until.interrupted
            may_stop = not waits_for_all or bool(self._sampling) or self._is_between_turns
            if until is not None and (interrupted == "stop" or (may_stop and self._has_enough(until))):
                self._stop()
                break
            if interrupted == "drain" and not drained:
                self._ready += [self._sampling.pop(name) for name in self._turns.stop_waiting()]
                drained = True
            if drained and not self._sampling:
                self._leave()
                break
            if not drained:
                self._begin()
                self._submit()
            works = bool(self._sampling)
            if self._sampling:
                with trace.engine_step(self._turns.is_decoding):
                    ended_turns = self._turns.step()
                for name, turn in ended_turns:
                    self._end_turn(self._sampling.pop(name), turn)
            if self._sampling or not drained:  # a drained call waits for no environment
                works |= self._observe(holds_answers=waits_for_all and not drained and bool(self._sampling))
            self._report(works, on_progress, on_group)
        if self._ended:  # while what was loading was finished
            self._report(True, on_progress, on_group)

    def pop_left(self) -> list[Episode]:
        """Return the episodes that another call may continue, which close() will not stop."""
        left, self._left = self._left, []
        return left

    def _report(self, works: bool, on_progress: Callable[[int | None], None] | None, on_group: OnGroup | None) -> None:
        ended, self._ended = self._ended, []
        if on_progress is not None:
            on_progress(len(ended) if ended or works else None)
        self._report_groups(dict.fromkeys(ended), on_group)

    def _report_groups(self, prompt_indices: Iterable[int], on_group: OnGroup | None) -> None:
        for prompt_index in prompt_indices:
            self._num_complete += self._groups.is_complete(prompt_index)
            if self._groups.has_ended(prompt_index) and on_group is not None:
                on_group(prompt_index, self._groups.completions(prompt_index))

    def _has_enough(self, until: Until) -> bool:
        required = range(until.num_required)
        return self._num_complete >= until.num_groups and all(map(self._groups.is_finished, required))

    def _stop(self) -> None:
        """Leave all episodes that have not ended, and keep the tokens of their turns."""
        stopped = [(self._sampling.pop(name), begun) for name, begun in self._turns.stop()]
        assert not self._sampling, "the engine dropped a request"
        for episode, begun in stopped:
            episode.stop_turn(begun, policy_version=self._rules.policy_version)
            self._ready.append(episode)
        self._leave()

    def _leave(self) -> None:
        """Leave the episodes that have not ended as they are; none of them is being sampled."""
        if self._loading:
            wait([each.vision for each in self._loading])
            loading, self._loading = self._loading, []
            for each in loading:
                self._show(each.episode, each.tokens, each.vision)
        without_environment = {episode.number for episode in self._not_begun}
        left: list[tuple[Episode, bool, Outcome | None]] = [
            *((episode, False, None) for episode in [*self._not_begun, *self._ready]),
            *((episode, True, None) for episode in self._waiting.values()),
            *((episode, True, outcome) for episode, outcome in self._answers),
        ]
        for collection in (self._not_begun, self._ready, self._waiting, self._answers):
            collection.clear()
        for episode, is_waiting, outcome in left:
            unfinished = episode.unfinished(policy_version=self._rules.policy_version)
            self._groups.add(episode.prompt_index, episode.sample, unfinished)
            if self._settings is None or episode.number in without_environment:
                continue
            if self._groups.has_failed(episode.prompt_index):  # its prompt has no completions
                self._settings.environments.stop(episode.number)
                continue
            self._left.append(episode)
            episode.leave(is_waiting=is_waiting, outcome=outcome)

    def _load_observed(self) -> None:
        """Process the images that episodes have observed in earlier calls."""
        settings = self._settings
        if settings is None:
            return
        assert self._loaders is not None
        continued = [*self._waiting.values(), *self._ready, *(episode for episode, _ in self._answers)]
        media = [each for episode in continued for each in episode.media]
        visions = self._loaders.map(settings.load_pixels, media)
        for episode in continued:
            episode.observed += itertools.islice(visions, len(episode.media))

    def close(self) -> None:
        """Stop the environments of the episodes that have not ended."""
        if self._settings is None:
            return
        assert self._loaders is not None
        self._loaders.shutdown(cancel_futures=True)
        running = [*self._waiting.values(), *self._ready, *self._sampling.values(), *self._left]
        running += [each.episode for each in self._loading]
        running += [episode for episode, _ in self._answers]
        for episode in running:
            self._settings.environments.stop(episode.number)

    def metrics(self) -> Metrics:
        """Return the metrics of all episodes; none without settings."""
        if self._settings is None:
            return {}
        metrics: dict[str, Metric] = {
            "rollout/dropped_tokens": Sum(float(self._num_dropped)),
            "rollout/episodes_ended_by_length": Sum(float(self._num_cut)),
            "rollout/episodes_failed": Sum(float(self._num_failed)),
            "perf/environment_wait_fraction": Mean(self._idle_seconds, time.perf_counter() - self._started),
        }
        if self._num_turns:
            metrics["rollout/num_turns"] = mean_of(self._num_turns)
        if self._answer_seconds:
            metrics["perf/environment_step_seconds"] = mean_of(self._answer_seconds)
        return metrics

    @property
    def _is_between_turns(self) -> bool:
        """Whether all episodes that have begun are ready for their next turn."""
        return not (self._sampling or self._waiting or self._answers or self._loading)

    def _begin(self) -> None:
        """Begin as many episodes as may run at a time; turn by turn, only between turns."""
        settings = self._settings
        if settings is None:
            self._ready += self._not_begun
            self._not_begun.clear()
        elif self._is_between_turns or not self._rules.turn_by_turn:
            collections = (self._waiting, self._answers, self._loading, self._ready, self._sampling)
            num_running = sum(map(len, collections))
            most = len(self._not_begun) if settings.max_episodes is None else settings.max_episodes - num_running
            for _ in range(min(most, len(self._not_begun))):
                episode = self._not_begun.popleft()
                files = settings.image_files(episode.unprocessed)
                settings.environments.start(episode.number, episode.prompt.row, files)
                self._wait_for(episode)

    def _submit(self) -> None:
        """Submit the next turns; turn by turn, once all episodes are ready."""
        if not self._ready or (self._rules.turn_by_turn and not self._is_between_turns):
            return
        most = self._rules.sampling.max_tokens
        limit = None if self._settings is None else self._settings.max_turn_tokens
        for episode in sorted(self._ready, key=lambda episode: episode.order):
            left = most - len(episode.token_ids)
            left_of_turn = (left if limit is None else min(left, limit)) - len(episode.begun.token_ids)
            request = episode.request(left_of_turn, self._stop_texts)
            self._turns.submit(request)
            self._sampling[request.name] = episode
        self._ready.clear()

    def _end_turn(self, episode: Episode, turn: SampledTurn | None) -> None:
        if turn is None:  # the prompt of the episode has no completions
            self._end(episode, None)
            return
        turn = episode.end_turn(turn, policy_version=self._rules.policy_version)
        if self._settings is None:
            episode.add(turn)
            self._end(episode, turn.finish_reason)
            return
        turn, action = self._end_with_calls(turn, self._settings.tool_format)
        episode.add(turn)
        if turn.finish_reason == "length":
            self._end(episode, turn.finish_reason)
            return
        self._wait_for(episode)
        self._settings.environments.step(episode.number, action)

    def _action(self, token_ids: Sequence[int]) -> str:
        """Return the text of a turn for its environment.

        It has no end-of-sequence token, but it has other special tokens, with which some models
        mark calls of tools.
        """
        has_end = token_ids[-1] in self._rules.stop_token_ids
        return self._rules.decode(token_ids[:-1] if has_end else token_ids)

    def _end_with_calls(self, turn: SampledTurn, tool_format: ToolFormat | None) -> tuple[SampledTurn, str]:
        """Return a turn without what was sampled after its calls of tools, and its text.

        The last call keeps its last token whole. Space and an end-of-sequence token may follow.
        """
        action = self._action(turn.token_ids)
        end = None if tool_format is None else end_of_calls(action, tool_format)
        if end is None or not action[end:].strip():
            return turn, action
        decode, call = self._rules.decode, action[:end]
        lengths = range(1, len(turn.token_ids) + 1)
        kept = lengths[bisect_left(lengths, True, key=lambda length: decode(turn.token_ids[:length]).startswith(call))]
        self._num_dropped += len(turn.token_ids) - kept
        token_ids = turn.token_ids[:kept]
        text = self._rules.to_text(token_ids)
        cut = replace(turn, token_ids=token_ids, logprobs=turn.logprobs[:kept], text=text, finish_reason="stop")
        return cut, self._action(token_ids)

    def _wait_for(self, episode: Episode) -> None:
        """Note that the environment of an episode is asked."""
        episode.asked = time.perf_counter()
        self._waiting[episode.number] = episode

    def _observe(self, *, holds_answers: bool) -> bool:
        """Receive the answers of environments and apply them; wait if there is nothing to sample.

        holds_answers: only receive them. Returns: whether there was anything.
        """
        settings = self._settings
        if settings is None:
            return False
        can_sample = self._sampling or (self._ready and not self._rules.turn_by_turn)
        began = time.perf_counter()
        outcomes: Sequence[Outcome] = ()
        if self._waiting:
            is_idle = not (can_sample or self._loading or self._answers)
            outcomes = settings.environments.poll(POLL_SECONDS if is_idle else 0.0)
            for outcome in outcomes:
                self._receive(outcome)
        answers: list[tuple[Episode, Outcome]] = []
        if not holds_answers:
            answers, self._answers = self._answers, answers
        for episode, outcome in answers:
            self._continue(settings, episode, outcome)
        loaded = bool(self._loading)
        if self._loading:
            wait([each.vision for each in self._loading], 0 if can_sample or answers else None, FIRST_COMPLETED)
            finished = [each for each in self._loading if each.vision.done()]
            self._loading = [each for each in self._loading if not each.vision.done()]
            for each in finished:
                self._show(each.episode, each.tokens, each.vision)
        if not can_sample:
            self._idle_seconds += time.perf_counter() - began
        return loaded or bool(outcomes or answers)

    def _receive(self, outcome: Outcome) -> None:
        """Keep the answer of an environment until it is applied."""
        episode = self._waiting.pop(outcome.episode, None)
        if episode is not None:
            if episode.asked is not None:
                self._answer_seconds.append(time.perf_counter() - episode.asked)
            self._answers.append((episode, outcome))
        elif outcome.episode in self._others:
            self._others[outcome.episode].outcome = outcome
        # Otherwise it is of an episode that a call that failed has stopped.

    def _continue(self, settings: EpisodeSettings, episode: Episode, outcome: Outcome) -> None:
        """Continue an episode whose environment has answered."""
        if episode.turns:
            episode.turns[-1] = replace(episode.turns[-1], reward=outcome.reward)
        if outcome.error:
            self._fail(episode, outcome.error)
        elif outcome.done and episode.turns:
            self._end(episode, "stop")
        elif outcome.done:
            self._fail(episode, "the environment was done before the first turn; return an observation from reset()")
        elif len(episode.turns) == settings.max_turns:
            self._end(episode, "turns")
        elif not episode.turns and not settings.opens:
            assert outcome.observation is None, "a first observation after a prompt with a generation prompt"
            self._ready.append(episode)
        elif episode.turns and outcome.observation is None:
            self._fail(episode, "the environment is not done, but returned no observation from step()")
        else:
            try:
                tokens = self._tokens(settings.template, episode, outcome.observation)
            except DataError as error:
                self._fail(episode, str(error))
                return
            self._append(settings, episode, tokens)

    def _tokens(self, template: TurnTemplate, episode: Episode, observation: Observation | None) -> TurnTokens:
        if not episode.turns:
            return template.opening(observation)
        assert observation is not None
        return template.reply(observation, last_token_id=episode.token_ids[-1])

    def _append(self, settings: EpisodeSettings, episode: Episode, tokens: TurnTokens) -> None:
        """Append an observation if there is room for it and for a token after it."""
        most = self._rules.sampling.max_tokens
        if len(tokens.token_ids) < most - len(episode.token_ids):
            if tokens.media is None:
                episode.observe(tokens, None)
                self._ready.append(episode)
            else:
                assert self._loaders is not None
                vision = self._loaders.submit(settings.load_pixels, tokens.media)
                self._loading.append(_Loading(episode, tokens, vision))
        elif episode.turns:
            self._end(episode, "length")
        else:
            self._fail(episode, find_long_opening(len(tokens.token_ids), most) or "")

    def _show(self, episode: Episode, tokens: TurnTokens, vision: Future[Vision]) -> None:
        try:
            episode.observe(tokens, vision.result())
        except DataError as error:
            self._fail(episode, str(error))
        else:
            self._ready.append(episode)

    def _fail(self, episode: Episode, error: str) -> None:
        self._end(episode, "stop", error=" ".join(error.split()))

    def _end(self, episode: Episode, reason: FinishReason | None, *, error: str = "") -> None:
        """End an episode. reason: None if the engine failed to sample it."""
        completion = None
        if reason is not None:
            end_token_id, version = self._rules.stop_token_ids[0], self._rules.policy_version
            completion = episode.completion(reason, policy_version=version, end_token_id=end_token_id, error=error)
        self._groups.add(episode.prompt_index, episode.sample, completion)
        self._ended.append(episode.prompt_index)
        if self._settings is not None:
            self._settings.environments.stop(episode.number)
        if error:
            self._num_failed += 1
        elif completion is not None:
            self._num_turns.append(len(completion.turns))
            self._num_cut += reason == "length"


def _begun(until: Until | None, groups: Groups) -> dict[tuple[int, int], Completion]:
    """Return the begun completions, by prompt index and sample, and add ended ones to groups."""
    if until is None:
        return {}
    begun = {
        (prompt_index, sample): completion
        for prompt_index, completions in enumerate(until.begun)
        for sample, completion in enumerate(completions)
    }
    for (prompt_index, sample), completion in begun.items():
        if not completion.is_unfinished:
            groups.add(prompt_index, sample, completion)
    return begun


def find_long_opening(num_tokens: int, max_tokens: int) -> str | None:
    """Return why a first observation of num_tokens tokens ends an episode; None if it does not.

    max_tokens: most tokens of a completion. At least one has to be sampled.
    """
    if num_tokens < max_tokens:
        return None
    return (
        f"its first observation has {num_tokens} tokens, and a completion has at most {max_tokens} tokens "
        "(data.max_response_length, or max_tokens of worker.rollout.val_override_config): raise it, or make the "
        "observation smaller"
    )


def newest_draw(prompts: Sequence[Prompt]) -> int:
    """Return the step for which the last of these prompts was drawn; 0 for a validation."""
    return max((prompt.draw for prompt in prompts), default=0)

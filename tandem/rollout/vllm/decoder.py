"""The decoder that is vLLM: its scheduler, paged cache and kernels, stepped by the thread of our engine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import count

import torch
from vllm import LLMEngine, SamplingParams  # type: ignore  # not every checkout has vllm
from vllm.v1.engine import EngineCoreOutput  # type: ignore  # as above

from tandem.roles import Fingerprint, NamedTensors
from tandem.rollout.loading import check_weights
from tandem.rollout.rows import Finished, Row, ending
from tandem.rollout.vllm import workers
from tandem.types import FinishReason, Max, Metrics, RolloutFailed, Sampling

SEEDS = 1 << 64


class VllmDecoder:
    """Plays the Decoder. A row is a request of vLLM; what runs, waits or is preempted there is vLLM's affair.

    Requests go to vLLM's core and tokens come from it as they are drawn. Its front is passed by: it would make a report
    of every token in Python, which for many rows takes longer than the GPU.

    With asynchronous scheduling a step of vLLM's is under way while we read the one before. Whatever changes weights or
    cache first waits for it and takes its tokens: they are of the weights that they were drawn with.
    """

    def __init__(self, engine: LLMEngine) -> None:
        """It works in this process, on token ids only, and gives the log-probs of the processed law."""
        self._engine = engine
        self._core = self._engine.engine_core
        self._tasks = self._engine.get_supported_tasks()
        model, scheduler = self._engine.vllm_config.model_config, self._engine.vllm_config.scheduler_config
        self.vocabulary: int = model.get_vocab_size()
        self.max_length: int = model.max_model_len
        self._max_rows: int = scheduler.max_num_seqs
        self._numbers = count()
        self._rows: dict[str, Row] = {}  # by the request's id
        self._finished: list[Finished] = []  # between two calls of step()
        self._updates = 0  # requests of other weights share no cache: a salt of its hashes
        self._shapes: dict[str, tuple[int, ...]] = self._engine.collective_rpc(workers.shapes)[0]
        self._is_tied = bool(self._engine.collective_rpc(workers.tied)[0])

    @property
    def free(self) -> int:
        return self._max_rows - len(self._rows)

    def admit(self, rows: Sequence[Row]) -> None:
        for row in rows:
            name = str(next(self._numbers))
            prompt = {"prompt_token_ids": [*row.prompt, *row.tokens], "cache_salt": str(self._updates)}
            params = params_of(row.sampling, self.vocabulary, written=len(row.tokens))
            self._core.add_request(self._engine.input_processor.process_inputs(name, prompt, params, self._tasks))
            self._rows[name] = row

    def remove(self, row: Row) -> None:
        self._finished = [(other, outcome) for other, outcome in self._finished if other is not row]
        for name in [name for name, other in self._rows.items() if other is row]:
            self._core.abort_requests([name])
            del self._rows[name]

    def step(self) -> list[Finished]:
        self._take_step()
        finished, self._finished = self._finished, []
        return finished

    def _take_step(self) -> None:
        for output in self._core.get_output().outputs:
            row = self._rows.get(output.request_id)
            if row is None:  # aborted in the middle of this step
                continue
            outcome = take(row, output)
            if outcome is None:
                continue
            del self._rows[output.request_id]
            if not output.finished:
                self._core.abort_requests([output.request_id])
            self._finished.append((row, outcome))

    def _settle(self) -> None:
        """Wait for the step that is under way, if there is one, and start none."""
        core = self._core.engine_core
        if core.batch_queue is None:
            return
        core.pause_scheduler(mode="keep", clear_cache=False)  # nothing more is scheduled, requests keep their places
        while any(scheduled.total_num_scheduled_tokens for _, scheduled, _ in core.batch_queue):
            self._take_step()
        core.resume_scheduler()

    def sleep(self, *, keep_weights: bool) -> Metrics:
        """vLLM's levels: 1 moves weights to the host's memory, 2 drops them. Nothing of the cache is kept."""
        self._settle()
        before = self._used_bytes()
        self._engine.sleep(level=1 if keep_weights else 2)
        return memory_metrics("sleep", before, self._used_bytes())

    def wake(self) -> Metrics:
        before = self._used_bytes()
        self._take_memory("weights")
        return memory_metrics("wake", before, self._used_bytes())

    def wake_cache(self) -> None:
        self._take_memory("kv_cache")

    def _take_memory(self, tag: str) -> None:
        """vLLM asks the device for it, which may not have what torch keeps for the trainers of this process."""
        torch.cuda.empty_cache()
        self._engine.wake_up([tag])

    def _used_bytes(self) -> list[int | None]:
        return self._engine.collective_rpc(workers.used_bytes)

    def recompute(self) -> None:
        """Every request gives its blocks back and is scheduled again, with its text as the prompt."""
        self._settle()
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def load_weights(self, weights: NamedTensors) -> None:
        """All are checked before vLLM takes the first. A stream is read in vLLM's workers."""
        self._settle()
        checked = check_weights(self._shapes, weights)
        self._engine.collective_rpc(workers.take_weights, args=(checked,))
        # Running requests may go on reading what the old weights cached; new ones do not find it.
        self._updates += 1

    def fingerprint(self) -> Fingerprint:
        """Digested where the weights lie; ranks send sums."""
        return workers.join(self._engine.collective_rpc(workers.weigh_weights), tied=self._is_tied)

    def close(self) -> None:
        for row in list(self._rows.values()):
            self.remove(row)
        self._core.shutdown()


def memory_metrics(move: str, before: Sequence[int | None], after: Sequence[int | None]) -> Metrics:
    """The fullest device's memory in use, by whomever, in bytes. No devices: nothing."""
    found = {"before": before, "after": after}
    used = {when: [size for size in sizes if size is not None] for when, sizes in found.items()}
    return {f"gpu/used_{when}_{move}": Max(float(max(sizes))) for when, sizes in used.items() if sizes}


def params_of(sampling: Sampling, vocabulary: int, *, written: int) -> SamplingParams:
    """Our law in vLLM's words, for a request that has `written` tokens of its response already."""
    return SamplingParams(
        max_tokens=sampling.max_new_tokens - written,
        temperature=sampling.temperature,
        top_k=sampling.top_k or 0,  # 0: all
        top_p=sampling.top_p,
        seed=spread(sampling.seed, written),
        stop_token_ids=[token for token in sampling.stop_token_ids if 0 <= token < vocabulary],
        ignore_eos=True,  # the model's own; ours are stop tokens
        logprobs=0,  # of the token drawn
        detokenize=False,
    )


def spread(seed: int, written: int) -> int:
    """A seed whose lower half depends on all its bits: torch's generator on a CPU takes 32 of them.

    vLLM's stream begins anew with each of its requests: what is behind `written` tokens needs another than these had,
    or it would repeat their random numbers. Never negative, -1 is no seed to vLLM; and 63 bits, since on a GPU it
    keeps seeds as signed numbers.
    """
    text, salt = (seed % SEEDS).to_bytes(8, "big"), written.to_bytes(8, "big")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, salt=salt).digest(), "big") >> 1


def take(row: Row, output: EngineCoreOutput) -> FinishReason | RolloutFailed | None:
    """Add a step's tokens to a row; why it ends with them, or None. Nothing behind an ending is kept."""
    logprobs = output.new_logprobs
    assert logprobs is not None or not output.new_token_ids, "asked for"
    for place, token in enumerate(output.new_token_ids):
        row.tokens.append(token)
        row.logprobs.append(float(logprobs.logprobs[place, 0]))  # that of the token drawn comes first
        outcome = ending(row)
        if outcome is not None:
            return outcome
    if output.finished:
        return RolloutFailed(f"vLLM ended the request early: {output.finish_reason}", "infrastructure")
    return None

"""VllmEngine on a GPU, with a stand-in for vLLM: the order of its calls, its errors and threads."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from support.rollout import handle_of, make_vllm_settings
from trigon.errors import EngineError, RolloutError, WorkerError
from trigon.metrics import Min, Sum
from trigon.models.load import load_processors
from trigon.rollout.vllm import VllmEngine, engine, process, turns
from trigon.rollout.vllm.sleep import SleepingState
from trigon.types import Prompt, SamplingParams

SAMPLING = SamplingParams(n=2, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=4, ignore_eos=True, seed=5)
RESET = ["reset prefixes", "reset images"]


class FakeLLMEngine:
    """vLLM's LLMEngine, whose memory is on the GPU only while it is awake."""

    def __init__(self):
        self.calls, self.resident, self.requests = [], {"weights", "kv_cache"}, []
        self.engine_core = SimpleNamespace(shutdown=lambda: None)
        self.threads, self.compared = set(), []

    def apply_model(self, function):
        return [function(torch.nn.Linear(2, 2))]

    def sleep(self, level):
        assert not self.requests
        assert level == 2
        self.calls.append("sleep")
        self.resident.clear()

    def wake_up(self, tags):
        self.calls.append(f"wake {tags}")
        self.resident.update(tags)

    def reset_prefix_cache(self):
        self.calls.append("reset prefixes")
        return True

    def reset_encoder_cache(self):
        self.calls.append("reset images")

    def add_request(self, name, prompt, params):
        self.threads.add(torch.get_num_threads())
        self.requests.append(name)

    def has_unfinished_requests(self):
        return bool(self.requests)

    def step(self):
        assert self.resident == {"weights", "kv_cache"}
        self.threads.add(torch.get_num_threads())
        output = SimpleNamespace(
            finish_reason="length", token_ids=[1, 2, 3, 4], logprobs=SimpleNamespace(logprobs=[-1.0] * 4)
        )
        return [SimpleNamespace(finished=True, request_id=self.requests.pop(0), outputs=[output])]

    def abort_request(self, names):
        assert names == []


@pytest.fixture
def llm_engine(monkeypatch):
    fake = FakeLLMEngine()
    monkeypatch.setattr(engine, "start_llm_engine", lambda *args, **kwargs: fake)
    monkeypatch.setattr(engine, "in_weights_pool", lambda: None)

    class State(SleepingState):
        def restore(self):
            assert fake.resident == {"weights"}
            fake.calls.append("restore")

    def load(llm_engine, *args, **kwargs):
        assert llm_engine.resident == {"weights"}
        llm_engine.calls.append(f"load {kwargs['version']}")
        if kwargs["check_values"]:
            llm_engine.compared.append(kwargs["version"])

    monkeypatch.setattr(engine, "find_state", lambda model, is_dropped: State(()))
    monkeypatch.setattr(engine, "load_weights", load)
    monkeypatch.setattr(turns, "engine_input", lambda name, *args: name)
    monkeypatch.setattr(turns, "vllm_sampling_params", lambda *args, **kwargs: None)
    return fake


@pytest.fixture
def rollout(tiny_model, llm_engine):
    folder = tiny_model("qwen2")
    return VllmEngine(make_vllm_settings(folder, device="cuda"), load_processors(str(folder)))


@pytest.fixture
def several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_memory_comes_back_in_the_order_in_which_it_is_needed(rollout, llm_engine):
    assert llm_engine.calls == [*RESET, "sleep"]
    llm_engine.calls.clear()
    prompt = Prompt("train:0", (1, 2, 3), None, "", None, {}, ())
    for version in (0, 0):  # a sleep drops the weights, so that the same version is loaded again
        with rollout.awake(handle_of({}), version=version):
            [completions] = rollout.generate([prompt], SAMPLING)
        assert len(completions) == 2
    awake = ["wake ['weights']", "restore", "load 0", "wake ['kv_cache']", *RESET]
    assert llm_engine.calls == [*awake, *RESET, *RESET, "sleep"] * 2


def test_what_is_left_on_the_gpu_is_measured_with_vllm_awake(rollout, llm_engine, monkeypatch):
    left = iter([30, 5, 20])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2 << 30)

    def mem_get_info():
        assert llm_engine.resident == {"weights", "kv_cache"}
        return next(left) << 30, 80 << 30

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    for version in (0, 0):  # a validation, and the samples of the step
        with rollout.awake(handle_of({}), version=version):
            pass
    assert rollout.pop_metrics() == {"rollout/retried_requests": Sum(0.0), "perf/gpu_memory_free_gb": Min(7.0)}
    assert rollout.pop_metrics() == {"rollout/retried_requests": Sum(0.0)}
    with rollout.awake(handle_of({}), version=1):
        pass
    assert rollout.pop_metrics()["perf/gpu_memory_free_gb"] == Min(22.0)


@pytest.mark.extended
@pytest.mark.parametrize(("freq", "compared"), [(4, [0, 2, 4]), (0, [])])
def test_the_first_weights_of_a_restarted_engine_are_compared_at_any_version(
    tiny_model, llm_engine, monkeypatch, freq, compared
):
    monkeypatch.setattr(engine, "stop_llm_engine", lambda stopped: llm_engine.resident.update({"weights", "kv_cache"}))
    folder = tiny_model("qwen2")
    settings = make_vllm_settings(folder, device="cuda", weight_check_freq=freq)
    rollout = VllmEngine(settings, load_processors(str(folder)))
    for version in (0, 1, 2, 3, 4):
        if version == 2:
            rollout.restart()
        with rollout.awake(handle_of({}), version=version):
            pass
    assert llm_engine.compared == compared


def test_vllm_computes_with_one_thread_beside_a_gpu(rollout, llm_engine, several_threads):
    with rollout.awake(handle_of({}), version=0):
        rollout.generate([Prompt("train:0", (1, 2, 3), None, "", None, {}, ())], SAMPLING)
    assert llm_engine.threads == {1}
    assert torch.get_num_threads() == 3


@pytest.mark.extended
def test_an_engine_that_sleeps_is_woken_before_it_is_closed_or_replaced(rollout, llm_engine, monkeypatch):
    resident = []
    stop = lambda *stopped: resident.append(set(llm_engine.resident))  # noqa: E731
    monkeypatch.setattr(engine, "stop_llm_engine", stop)
    llm_engine.engine_core.shutdown = stop
    assert llm_engine.resident == set()
    rollout.restart()
    assert llm_engine.resident == set()
    rollout.close()
    assert resident == [{"weights", "kv_cache"}] * 2


def test_an_engine_that_cannot_be_woken_is_closed_all_the_same(rollout, llm_engine, monkeypatch):
    def wake_up(tags):
        raise RuntimeError("CUDA Error: out of memory")

    stopped = []
    llm_engine.engine_core.shutdown = lambda: stopped.append(True)
    monkeypatch.setattr(llm_engine, "wake_up", wake_up)
    with pytest.raises(RolloutError, match="out of memory"):
        rollout.restart()
    with pytest.warns(UserWarning, match="out of memory"):
        rollout.close()
    assert stopped == [True]


@pytest.mark.parametrize(("tag", "what"), [("weights", "the weights"), ("kv_cache", "the KV cache")])
def test_too_little_memory_to_wake_up_is_an_error_that_says_what_to_change(rollout, llm_engine, monkeypatch, tag, what):
    def wake_up(tags):
        if tags == [tag]:
            raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:61")

    monkeypatch.setattr(llm_engine, "wake_up", wake_up)
    monkeypatch.setattr(SleepingState, "restore", lambda self: None)
    llm_engine.resident = {"weights"}
    expected = rf"no room for {what}.*out of memory.*gpu_memory_utilization"
    with pytest.raises(EngineError, match=expected), rollout.awake(handle_of({}), version=0):
        pass
    with pytest.raises(EngineError, match="could not wake up"), rollout.awake(handle_of({}), version=0):
        pass


def test_what_vllm_refuses_at_its_start_is_an_error_with_the_names_of_options(monkeypatch, several_threads):
    class LLMEngine:
        @classmethod
        def from_engine_args(cls, arguments):
            assert torch.get_num_threads() == 1
            raise ValueError("No available memory for the cache blocks.")

    vllm = SimpleNamespace(LLMEngine=LLMEngine, EngineArgs=dict)
    monkeypatch.setattr(process, "import_vllm", lambda device: vllm)
    with pytest.raises(EngineError, match=r"No available memory(.|\n)*worker\.rollout\.gpu_memory_utilization"):
        process.start_llm_engine({"tensor_parallel_size": 1, "dtype": torch.bfloat16}, device="cuda", architectures=())
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(
    ("dtype", "setting", "expected"),
    [(torch.float32, None, "ieee"), (torch.float32, "tf32x3", "tf32x3"), (torch.bfloat16, None, None)],
)
def test_triton_multiplies_float32_in_float32(monkeypatch, dtype, setting, expected):
    monkeypatch.setenv("TRITON_F32_DEFAULT", setting or "")  # restores it after the test
    if setting is None:
        monkeypatch.delenv("TRITON_F32_DEFAULT")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    llm_engine = SimpleNamespace(from_engine_args=lambda arguments: "started")
    monkeypatch.setattr(process, "import_vllm", lambda device: SimpleNamespace(LLMEngine=llm_engine, EngineArgs=dict))
    process.start_llm_engine({"tensor_parallel_size": 1, "dtype": dtype}, device="cuda", architectures=())
    triton = pytest.importorskip("triton")
    assert triton.knobs.language.fp32_default == expected


@pytest.mark.extended
@pytest.mark.faults
@pytest.mark.parametrize("where", ["step", "restart"])
def test_the_error_of_the_watchdog_ends_the_run_and_starts_no_engine_again(rollout, llm_engine, monkeypatch, where):
    hang = WorkerError("gen made no progress")
    interrupted = Mock(side_effect=hang)
    if where == "step":
        monkeypatch.setattr(llm_engine, "step", interrupted)
        monkeypatch.setattr(llm_engine, "abort_request", Mock(side_effect=AssertionError("vLLM is not called again")))
        with pytest.raises(WorkerError) as caught, rollout.awake(handle_of({}), version=0):
            rollout.generate([Prompt("train:0", (1, 2, 3), None, "", None, {}, ())], SAMPLING)
    else:
        monkeypatch.setattr(engine, "stop_llm_engine", lambda engine: None)
        monkeypatch.setattr(engine, "start_llm_engine", interrupted)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        with pytest.raises(WorkerError) as caught:
            rollout.restart()
    assert caught.value is hang
    with pytest.raises(EngineError, match="cannot be used"), rollout.awake(handle_of({}), version=0):
        pass

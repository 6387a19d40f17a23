"""Causes faults in torch and vLLM, in processes that are started with this folder in PYTHONPATH.

Python imports this module when it starts.

TRIGON_TEST_FAULTS is JSON: a list of [fault, rank, number of the call, counted from 1]. A rank is
that of the worker, and 0 in a run of one worker.
"""

import importlib.machinery
import json
import os
import sys

FAULTS = json.loads(os.environ.get("TRIGON_TEST_FAULTS", "[]"))


def happens(fault, counts):
    """Count a call, and return whether this fault happens at it."""
    counts[fault] = counts.get(fault, 0) + 1
    return [fault, int(os.environ.get("RANK", "0")), counts[fault]] in FAULTS


def break_backward(autograd, counts):
    """From one call on, the gradient is nan."""
    backward = autograd.backward

    def broken(tensors, *args, **kwargs):
        if happens("nan gradient", counts) or counts.get("is nan"):
            counts["is nan"] = 1
            tensors = tensors * float("nan")
        return backward(tensors, *args, **kwargs)

    autograd.backward = broken


def break_optimizer(adamw, counts):
    """One update writes a nan into the first weight, or into its first moment."""
    import torch

    step = adamw.AdamW.step

    def broken(optimizer, *args, **kwargs):
        result = step(optimizer, *args, **kwargs)
        parameter = optimizer.param_groups[0]["params"][0]
        for fault, tensor in (("nan weight", parameter), ("nan moment", optimizer.state[parameter]["exp_avg"])):
            if happens(fault, counts):
                with torch.no_grad():
                    getattr(tensor, "_local_tensor", tensor).view(-1)[0] = float("nan")
        return result

    adamw.AdamW.step = broken


def break_runner(cpu_model_runner, counts):
    """A forward pass fails; a weight sync fails when vLLM has read five tensors."""
    runner = cpu_model_runner.CPUModelRunner
    execute, reload = runner.execute_model, runner.reload_weights

    def broken_execute(self, *args, **kwargs):
        if happens("compute", counts):
            raise RuntimeError("a kernel failed")
        return execute(self, *args, **kwargs)

    def first_five(tensors):
        for number, pair in enumerate(tensors):
            if number == 5:
                raise RuntimeError("no memory for a copy")
            yield pair

    def broken_reload(self, weights_iterator, **kwargs):
        if happens("load", counts):
            weights_iterator = first_five(weights_iterator)
        return reload(self, weights_iterator, **kwargs)

    runner.execute_model, runner.reload_weights = broken_execute, broken_reload


def break_engine(llm_engine, counts):
    """A running request disappears."""
    step = llm_engine.LLMEngine.step

    def losing(self):
        outputs = step(self)
        running = self.output_processor.request_states
        if running and happens("lose", counts):
            self.abort_request([next(iter(running.values())).external_req_id])
        return outputs

    llm_engine.LLMEngine.step = losing


HOOKS = {
    "torch.autograd": break_backward,
    "torch.optim.adamw": break_optimizer,
    "vllm.v1.worker.cpu_model_runner": break_runner,
    "vllm.v1.engine.llm_engine": break_engine,
}


class Finder:
    """Runs a hook as soon as its module has been imported."""

    def __init__(self):
        self.counts = {}

    def find_spec(self, name, path=None, target=None):
        if name not in HOOKS:
            return None
        hook = HOOKS.pop(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            hook(module, self.counts)

        spec.loader.exec_module = exec_module
        return spec


if FAULTS:
    sys.meta_path.insert(0, Finder())

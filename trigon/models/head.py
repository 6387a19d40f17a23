"""A model's head as a module that computes log-probabilities.

FSDP gathers the weights of a module around calls of its methods. The head's weight is therefore
used in methods of the head only, and not taken from it. Does not depend on models.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from trigon.models.logprobs import Predictions, token_logprobs

FORWARD_METHODS = ("token_logprobs", "full_weight")
"""The methods of LogprobHead that use its weight, besides forward."""


class LogprobHead(nn.Linear):
    """A head that computes log-probabilities; its forward is that of Linear."""

    def token_logprobs(
        self,
        states: Tensor,
        targets: Tensor,
        *,
        temperature: float,
        banned_token_ids: Sequence[int],
        entropy_gradient: bool,
        against: Predictions | None,
        chunk_tokens: int | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return logprobs, entropy and kl of logprobs.token_logprobs, with this weight.

        They are a tuple because FSDP finds gradients in tuples, not in dataclasses.
        """
        outputs = token_logprobs(
            states,
            self.weight,
            targets,
            temperature=temperature,
            banned_token_ids=banned_token_ids,
            entropy_gradient=entropy_gradient,
            against=against,
            chunk_tokens=chunk_tokens,
        )
        return outputs.logprobs, outputs.entropy, outputs.kl

    def full_weight(self) -> Tensor:
        """Return the weight [V, D] without gradient; if it is sharded, until it is resharded."""
        return self.weight.detach()


def use_logprob_head(model: nn.Module) -> None:
    """Make the head of a transformers model a LogprobHead. Its parameters do not change."""
    head = model.get_submodule("lm_head")
    if not isinstance(head, LogprobHead):
        assert type(head) is nn.Linear, f"the head is a {type(head).__name__}"
        head.__class__ = LogprobHead

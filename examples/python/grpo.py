"""GRPO on a list of dicts with a reward function in Python: python grpo.py [MODEL]"""

import sys

import trigon

rows = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(10, 30) for b in range(10, 30)]


def reward(response, ground_truth):
    return float(response.strip().rstrip(".").endswith(ground_truth))


model = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen2.5-0.5B-Instruct"
result = trigon.train(
    model=model,
    data=rows,
    reward=reward,
    trainer={"max_steps": 50, "experiment_name": "sums"},
    options={
        "data": {"rollout_batch_size": 16, "max_prompt_length": 128, "max_response_length": 64},
    },
)
print(result.metrics["reward/overall"])

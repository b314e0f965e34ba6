"""GAE without a loop over tokens against the plain backward loop: `python benchmarks/gae.py [--device cuda]`."""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from tandem.algorithms.gae import Gae, gae

GAMMA, LAMBDA = 0.99, 0.95
SHAPES = ((64, 1024), (512, 4096), (512, 16384))


def plain_loop(rewards_NT: Tensor, values_NT: Tensor, mask_NT: Tensor) -> Gae:
    """The usual implementation: one step of Python a token, from the last to the first."""
    advantages_NT = torch.zeros_like(values_NT)
    advantage_N = torch.zeros_like(values_NT[:, 0])
    next_value_N = torch.zeros_like(advantage_N)
    for t in reversed(range(values_NT.shape[1])):
        delta_N = rewards_NT[:, t] + GAMMA * next_value_N - values_NT[:, t]
        advantage_N = torch.where(mask_NT[:, t], delta_N + GAMMA * LAMBDA * advantage_N, advantage_N)
        next_value_N = torch.where(mask_NT[:, t], values_NT[:, t], next_value_N)
        advantages_NT[:, t] = advantage_N
    advantages_NT = torch.where(mask_NT, advantages_NT, 0.0)
    return Gae(advantages_NT, torch.where(mask_NT, advantages_NT + values_NT, 0.0))


def ours(rewards_NT: Tensor, values_NT: Tensor, mask_NT: Tensor) -> Gae:
    return gae(rewards_NT, values_NT, mask_NT, gamma=GAMMA, lambda_value=LAMBDA, lambda_policy=LAMBDA)


def ours_by_row(rewards_NT: Tensor, values_NT: Tensor, mask_NT: Tensor) -> Gae:
    """The dear case: a policy lambda for every row (length-adaptive), hence two sums instead of one."""
    lambda_N = torch.full_like(values_NT[:, 0], LAMBDA, dtype=torch.float64)
    return gae(rewards_NT, values_NT, mask_NT, gamma=GAMMA, lambda_value=LAMBDA, lambda_policy=lambda_N)


def masks(shape: tuple[int, int], device: str) -> dict[str, Tensor]:
    """One answer a row of random length, and conversations: 200 tokens of the policy, then 56 of a tool."""
    column_T = torch.arange(shape[1], device=device)
    length_N1 = torch.randint(shape[1] // 8, shape[1] + 1, (shape[0], 1), device=device)
    answer_NT = column_T < length_N1
    return {"one turn": answer_NT, "tool turns": answer_NT & (column_T % 256 < 200)}


def median_ms(function: Callable[[], Gae], repeats: int, cuda: bool) -> float:
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        if cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    device, cuda = arguments.device, arguments.device.startswith("cuda")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    where = torch.cuda.get_device_name() if cuda else f"cpu, {arguments.threads} threads"
    print(f"torch {torch.__version__} on {where}; float32, medians of {arguments.repeats}")
    titles = ("loop ms", "ours ms", "ratio", "by row ms", "ratio", "|diff|")
    print(f"{'shape':>13} {'mask':>10}", *(f"{title:>9}" for title in titles))
    for shape in SHAPES:
        rewards_NT, values_NT = torch.randn(shape, device=device), torch.randn(shape, device=device)
        for name, mask_NT in masks(shape, device).items():
            data = (rewards_NT, values_NT, mask_NT)
            expected, got = plain_loop(*data), ours(*data)
            difference = max(float((a - b).abs().max()) for a, b in zip(expected, got, strict=True))
            loop = median_ms(lambda data=data: plain_loop(*data), max(2, arguments.repeats // 3), cuda)
            fast = median_ms(lambda data=data: ours(*data), arguments.repeats, cuda)
            by_row = median_ms(lambda data=data: ours_by_row(*data), arguments.repeats, cuda)
            print(
                f"{shape[0]:>5} x {shape[1]:>5} {name:>10} {loop:>9.1f} {fast:>9.2f} {loop / fast:>9.1f} "
                f"{by_row:>9.2f} {loop / by_row:>9.1f} {difference:>9.1e}"
            )


if __name__ == "__main__":
    main()

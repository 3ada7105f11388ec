"""How long does a request for one row take if the head keeps its full Hessian?

    python scripts/bench_stream.py            # D = 512, 10,000 requests for one row of 50,000, made rows
    python scripts/bench_stream.py --quick

Beside each other, in processor time: ``RequestStream``; ``curvature=stored``, which decomposes the Hessian anew for
each request; and the factorisation alone, which is the limit of whatever factorises. Exits with 1 if the stream is not
at least 20 times as fast as ``stored`` (not with ``--quick``), or its head drifts from Retrained by 1e-8.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch

import sfu
from sfu.unlearning.methods.newton import Newton

FASTER, DRIFT = 20.0, 1e-8


def seconds(work: Callable[[], object], count: int) -> float:
    """Return the processor time of one of ``count`` calls."""
    start = time.process_time()
    for _ in range(count):
        work()
    return (time.process_time() - start) / count


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512, help="features")
    parser.add_argument("--rows", type=int, default=50_000, help="training rows")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--quick", action="store_true", help="D = 32, 2,000 rows, 200 requests")
    given = parser.parse_args(arguments)
    if given.quick:
        given.width, given.rows, given.requests = 32, 2000, 200
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(given.rows, given.width, generator=generator, dtype=torch.float64) / given.width**0.5
    labels = torch.randint(10, (given.rows,), generator=generator)
    head = sfu.fit(features, labels, l2=1e-3, loss="quadratic", keep="full")
    stream, numbers = sfu.RequestStream(head), iter(range(given.requests))

    def one() -> None:
        row = next(numbers)
        stream.forget(features[row], labels[row])

    of_stream = seconds(one, given.requests)
    stored = Newton(sfu.curvature_settings(estimator="stored", regularization="none"))
    request = sfu.ForgetRequest(head, features[:1], labels[:1])
    of_stored = seconds(lambda: stored.unlearn(request, sfu.MethodContext()), 3)
    matrix = head.kept.data_hessian + 1e-3 * torch.eye(given.width + 1, dtype=torch.float64)
    of_factor = seconds(lambda: torch.cholesky_inverse(torch.linalg.cholesky(matrix)), 10)
    left = sfu.fit(features[given.requests :], labels[given.requests :], l2=1e-3, loss="quadratic")
    off = float((stream.head.parameters_CE - left.parameters_CE).norm() / left.parameters_CE.norm())
    where = f"one row of {given.rows:,}, D = {given.width}"
    print(f"{where}: {1e3 * of_stream:.2f} ms, {stream.factorizations} factorisations")
    print(f"{of_stored / of_stream:.1f} times as fast as curvature=stored ({1e3 * of_stored:.1f} ms)")
    print(f"{of_factor / of_stream:.1f} times as fast as a factorisation alone ({1e3 * of_factor:.1f} ms)")
    print(f"after {given.requests:,} requests: residual {stream.drift:.1e}, off Retrained {off:.1e}")
    return int(off >= DRIFT or (not given.quick and of_stored < FASTER * of_stream))


if __name__ == "__main__":
    raise SystemExit(main())

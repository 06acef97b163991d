"""Measures the latencies of `jaxpar serve` under load, and its rate against that of predicting the same texts directly.

    scripts/python scripts/bench/serve.py --workdir=runs/quickstart [--concurrent=500] [--rounds=3]

Starts the service in another process. A round sends one request of one text per client, all at the same time, and then
predicts the same texts in this process with `jaxpar.load`. Prints the number of requests that were answered, their
latencies, and the ratio of the rates, each of the last rounds (the first one compiles and does not count).
"""

import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jaxpar
from jaxpar.command_line import Parser, integer
from jaxpar.errors import exit_code
from jaxpar.use.serve.batching import Latencies

ROOT = Path(__file__).parents[2]
WORDS = ("a", "small", "dog", "that", "runs", "quickly", "of", "the", "house", "red", "to", "move", "in", "water")


def start(workdir: Path) -> tuple["subprocess.Popen[str]", int]:
    """Start the service, and return its process and port."""
    command = [sys.executable, str(ROOT / "scripts" / "serve.py"), f"--workdir={workdir}", "--port=0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"serving .*:(\d+)", line):
            return process, int(found[1])
    raise SystemExit("the service did not start")


async def ask(port: int, text: str, latencies: Latencies) -> bool:
    """Send a request, and return whether it was answered with a prediction."""
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"texts": [text]}).encode()
    head = "POST /predict HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    answer = await reader.read()
    writer.close()
    latencies.add(begin)
    return answer.startswith(b"HTTP/1.1 200") and b'"predictions"' in answer


def main() -> None:
    """Run the command line."""
    parser = Parser(__doc__)
    parser.require("--workdir", "--workdir=runs/quickstart", rule="the workdir of a run", type=Path, help="of a run")
    parser.add_argument("--concurrent", type=integer(1), default=500, help="requests at the same time (default: 500)")
    parser.add_argument("--rounds", type=integer(1), default=3, help="measurements (default: 3)")
    arguments = parser.parse()
    number = arguments.concurrent
    texts = [" ".join(WORDS[(7 * i + i // 14 * j + j) % len(WORDS)] for j in range(3 + i % 20)) for i in range(number)]
    model = jaxpar.load(arguments.workdir)
    process, port = start(arguments.workdir)
    latencies, answered, ratios = Latencies(), 0, []
    try:
        for round_ in range(arguments.rounds + 1):
            measured = Latencies() if round_ == 0 else latencies

            async def ask_all(measured: Latencies = measured) -> list[bool]:
                return await asyncio.gather(*(ask(port, text, measured) for text in texts))

            begin = time.perf_counter()
            right = asyncio.run(ask_all())
            middle = time.perf_counter()
            model.predict(texts)
            if round_:
                answered += sum(right)
                ratios.append((time.perf_counter() - middle) / (middle - begin))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    p50, p99 = (1000 * (latencies.percentile(percent) or 0) for percent in (50, 99))
    print(f"{answered:,} of {number * arguments.rounds:,} requests answered, {number} at the same time")
    print(f"latency p50 {p50:,.0f} ms, p99 {p99:,.0f} ms")
    print(f"rate of requests / rate of predicting the texts directly: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    sys.exit(exit_code(main))

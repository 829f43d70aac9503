"""llama-server's own server, of the same build that our adapter loads, in a process of its own.

    python -m bench.peer_server MODEL [--lanes 8] [--context 1024] [--threads 0]

Prints `listening http://<host>:<port>` when it serves, and ends when its standard input does.
"""

import argparse
import os
import sys

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024, help="tokens per lane")
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = arguments.model
    params.n_parallel = arguments.lanes
    params.n_ctx = arguments.context * arguments.lanes
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    threads = arguments.threads or len(os.sched_getaffinity(0))
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    print(f"listening {server.listening_address}", flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()

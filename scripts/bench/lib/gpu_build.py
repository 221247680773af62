"""Build the operators for this machine's GPU, unless they exist, and print what is in use.

Only the GPU's own architecture is built, which takes seconds instead of minutes, unless TORCH_CUDA_ARCH_LIST is set.
"""

import argparse
import os
import sys
import time


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cuda", help="cpu: only the CPU operators")
    args = p.parse_args()
    import torch

    from engine.ops import __main__, build, library

    kinds = ("cpu", "cuda") if args.device == "cuda" else ("cpu",)
    if args.device == "cuda":
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "{}.{}".format(*torch.cuda.get_device_capability()))
    failed = False
    for kind in kinds:
        began = time.perf_counter()
        try:
            if build.find(kind) is None:
                path, report = build.build(kind)
                print(report)
                print(f"{kind}: built {path.name} in {time.perf_counter() - began:.0f} s")
        except build.BuildError as error:
            print(f"{kind}: not built: {error}")
            failed = True
    __main__.main([])
    return int(failed or not all(library.on(torch.device(kind)).loaded for kind in kinds))


if __name__ == "__main__":
    sys.exit(main())

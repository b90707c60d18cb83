"""Find the timm architectures whose residual connections timm_ortho can replace, by building each architecture.

    python -m scripts.checks.survey [MODULE ...]    write timm_ortho/models/coverage.json

The script builds each architecture of timm's registry on the meta device and passes it to `timm_ortho.connect`. An
architecture is covered if `timm_ortho.blocks` supports all of its residual blocks and at least one block has a site (a
residual addition). The file also has the number of sites whose sum enters a norm of the block next, and lists the
remaining architectures, each with the reason. If MODULE names modules of timm.models, only their architectures are
built, and the rest of the file is kept. Building all architectures takes a while. Run `python -m scripts.pages`
afterwards to update the table in docs/coverage.md.
"""
import argparse
import json
import warnings

import timm
import torch
from timm.models import list_modules

from timm_ortho import RoutingError, UnsupportedModelError, connect, sites
from timm_ortho.blocks import host_class, route, spec_of
from timm_ortho.blocks.timm import NOT_RESIDUAL
from timm_ortho.models import coverage

NO_SUMS = "no residual additions"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="module of timm.models (default: all)")
    args = parser.parse_args()
    known = coverage.load()
    wanted = args.modules or [name for name in list_modules() if coverage.architectures(name)]
    surveyed = {}
    for module in wanted:
        surveyed[module] = survey(module)
        covered, left_out = surveyed[module]["covered"], surveyed[module]["left_out"]
        print(f"{module}: {len(covered)} covered, {len(left_out)} left out", flush=True)
    version = known["timm"] if args.modules else timm.__version__
    modules = {**known["modules"], **surveyed} if args.modules else surveyed  # without modules that timm removed
    values = {"timm": version, "modules": dict(sorted(modules.items()))}
    coverage.FILE.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def survey(module: str) -> dict:
    """Return three dicts by architecture: `covered` and `before_norm` have numbers of sites, `left_out` has reasons.

    `before_norm` lists only architectures with at least one such site.
    """
    covered, left_out, before_norm = {}, {}, {}
    for name in coverage.architectures(module):
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated models warn
            model = timm.create_model(name)
        try:
            covered[name] = len(sites(connect(model, "linear")))
        except RoutingError as error:
            left_out[name] = str(error)
        except UnsupportedModelError as error:
            left_out[name] = reason(model, error)
        else:
            routes = [(block, route(host_class(block), spec)) for block in model.modules() if (spec := spec_of(block))]
            following = [getattr(block, norm) for block, found in routes for kind, norm in found.next_norms.items()
                         if kind in found.reached(block)]
            if count := sum(not isinstance(norm, torch.nn.Identity) for norm in following):
                before_norm[name] = count
    return {"covered": covered, "left_out": left_out, "before_norm": before_norm}


def reason(model, error: UnsupportedModelError) -> str:
    """Return the reason why a model is not covered."""
    if error.unsupported:
        return f"residual blocks of unknown classes: {', '.join(error.unsupported)}"
    classes = [f"{type(module).__module__}.{type(module).__qualname__}" for module in model.modules()]
    reasons = [NOT_RESIDUAL[cls] for cls in classes if cls in NOT_RESIDUAL and cls.startswith("timm.models.")]
    return "; ".join(dict.fromkeys(reasons)) or NO_SUMS


if __name__ == "__main__":
    main()

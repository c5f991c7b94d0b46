"""What calibration wins, and what it costs, next to the figures that it should reach:
`python -m tests.solvers [losses|errors|costs]`. The losses take ten minutes on two
cores, the others a few."""

import sys

from .costs import costs
from .errors import errors
from .losses import losses


kinds = {"losses": losses, "errors": errors, "costs": costs}


def main():
    missed = 0
    for kind in sys.argv[1:] or kinds:
        for what, found, most in kinds[kind]():
            holds = found <= most
            missed += not holds
            print(
                f"{what}: {found:.4g} (at most {most:g}{'' if holds else ': MISSED'})"
            )
            sys.stdout.flush()
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()

"""The command `jaxpar`, or `python -m jaxpar`.

The imports of a command take some tenths of a second, in which Python would answer a Ctrl-C with a traceback. Signals
are therefore blocked from here until the command handles them.
"""

import signal


def enter() -> None:
    """Run the command line of this process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    from jaxpar.commands import run_command

    run_command()


if __name__ == "__main__":
    enter()

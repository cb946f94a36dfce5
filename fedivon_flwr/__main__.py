"""``python -m fedivon_flwr`` is the `fedivon` command."""

from fedivon_flwr.cli import main

if __name__ == "__main__":
    main()

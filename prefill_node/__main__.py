"""`python -m prefill_node`: starts a prefill node."""

from prefill_node.main import main

if __name__ == "__main__":
    main()

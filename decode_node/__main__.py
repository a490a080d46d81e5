"""`python -m decode_node`: starts a decode node."""

from decode_node.main import main

if __name__ == "__main__":
    main()

"""The command line, and what it runs without training: `init` (a new drafter for a target), `generate`, `demo`,
`benchmark`, `plot` and `check`; beside them the native MTP module as an assistant, and the traces of rounds."""

"""Studies: a table or figure of the paper as a TOML file and one command, ``fedivon study NAME``.

`spec` says what a study is and which runs it needs, `runner` runs them, `reports` makes tables and figures of them.
"""

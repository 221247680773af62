"""python -m modelcenter VERB"""

from modelcenter.cli import main

main()

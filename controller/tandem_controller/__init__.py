"""The controller: watches PairRun objects, picks the reference, makes the pods of a pair, ends with a verdict."""

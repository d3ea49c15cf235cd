-- A prompt counts once, whatever its length: the intervals are over prompts.
WITH pairs AS (
    SELECT one.emitted AS emitted, one.blocks AS blocks,
        other.emitted AS other_emitted, other.blocks AS other_blocks,
        one.completion_text = other.completion_text AS same,
        ln(one.emitted / (one.finished - one.started))
            - ln(other.emitted / (other.finished - other.started)) AS faster
    FROM prompts AS one JOIN prompts AS other USING (dataset, prompt_id, prompt_text)
    WHERE one.run = {one} AND other.run = {other} AND one.emitted > 0 AND other.emitted > 0
        AND one.finished > one.started AND other.finished > other.started
)
SELECT count(*) AS prompts, count(*) FILTER (same) AS same, avg(faster) AS faster, stddev_samp(faster) AS deviation,
    sum(emitted) / sum(blocks) AS efficiency, sum(other_emitted) / sum(other_blocks) AS other_efficiency
FROM pairs

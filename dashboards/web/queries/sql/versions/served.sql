-- A version is the latest of its target for the prompts after it, up to and including that of the next version; a
-- baseline is the latest from the first prompt.
SELECT prompts.run, serving.version, count(*) AS prompts,
    sum(judged)::BIGINT AS judged, sum(accepted)::BIGINT AS accepted,
    sum(emitted)::BIGINT AS emitted, sum(blocks)::BIGINT AS blocks
FROM prompts
ASOF JOIN serving
    ON prompts.run = serving.run AND prompts.target = serving.target AND prompts."offset" > serving.since
GROUP BY ALL

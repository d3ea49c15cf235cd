SELECT "offset", dataset, target, emitted, blocks, judged, accepted, left(prompt_text, {start}) AS start,
    accepted / nullif(judged, 0) AS acceptance, emitted / nullif(finished - started, 0) AS speed
FROM prompts WHERE {condition} ORDER BY {order} LIMIT {page} OFFSET {skip}

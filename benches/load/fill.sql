-- So many completed records, of keys at random or by time, as pairs leave them. Those by time end $3 milliseconds/10 ago.
INSERT INTO onceward_record (
    id, namespace, subject, value, token, earlier_tokens, fence, version, attempt, status, resolved, on_expiry, lock_ttl,
    retention, created_at, locked_until, finished_at, expires_at, purge_after, result_code, result_body
)
SELECT
    k.id, 'load.pairs', '', k.id::text, k.id::text, '', f.fence, f.fence + 1, 1, 2, false, 1, 30000000, 86400000000,
    t.made, t.made + interval '30 s', t.made, t.made + interval '24 h', t.made + interval '24 h 30 s', 200,
    convert_to(repeat('r', 256), 'UTF8')
FROM
    generate_series(1, $1) AS n
    CROSS JOIN LATERAL (SELECT clock_timestamp() - ($3 - n) * interval '0.1 ms' AS made) AS t
    CROSS JOIN LATERAL (SELECT (extract(epoch FROM t.made) * 1000000)::bigint AS fence) AS f
    CROSS JOIN LATERAL (
        SELECT CASE
            WHEN $2
                THEN (lpad(to_hex((extract(epoch FROM t.made) * 1000)::bigint), 12, '0') || substr(md5(random()::text), 1, 20))::uuid
            ELSE gen_random_uuid()
        END AS id
    ) AS k

-- GoogleSQL functions whose results differ from DuckDB's function of the same name.
-- Loaded into the schema "bq" at start. The modules of translation/functions and casts.py write the calls.
-- A failing cast is the only error that DuckDB lets TRY catch: error() is volatile.
-- A shift is the number of days that moves the wanted first day of a week onto DuckDB's Monday.

CREATE OR REPLACE MACRO bq.fail(message) AS CAST('bq: ' || message AS INTEGER);

CREATE OR REPLACE MACRO bq.fail_date(message) AS CAST('bq: ' || message AS DATE);

CREATE OR REPLACE MACRO bq.fail_timestamp(message) AS CAST('bq: ' || message AS TIMESTAMP);

-- Supported by BigQuery but not by this server. TRY must not turn it into NULL, and does not catch this error.
CREATE OR REPLACE MACRO bq.refuse(what) AS
    epoch_us(timezone('bq: ' || what || ' not supported by the embedded BigQuery', TIMESTAMP '1970-01-01'));

-- Numbers.

CREATE OR REPLACE MACRO bq.finite(v, operator) AS
    CASE WHEN isinf(v) THEN bq.fail('double overflow: ' || operator || ' (an infinite operand is not supported by the embedded BigQuery)') ELSE v END;

CREATE OR REPLACE MACRO bq.finite_of(v, a, name) AS
    CASE WHEN isinf(v) AND NOT isinf(a) THEN bq.fail('Floating point overflow in function: ' || name) ELSE v END;

CREATE OR REPLACE MACRO bq.float_text(v) AS CASE
    WHEN isnan(v) THEN 'nan'
    WHEN isinf(v) THEN CASE WHEN v > 0 THEN 'inf' ELSE '-inf' END
    WHEN v = 0 THEN '0'
    WHEN CAST(printf('%.15g', v) AS DOUBLE) = v THEN printf('%.15g', v)
    ELSE printf('%.17g', v) END;

CREATE OR REPLACE MACRO bq.float_shown(v) AS CASE WHEN v = 0 AND signbit(v) THEN '-0.0'
    ELSE regexp_replace(bq.float_text(v), '^(-?[0-9]+)$', '\1.0') END;

CREATE OR REPLACE MACRO bq.divide(a, b) AS
    CASE WHEN b = 0 AND a IS NOT NULL THEN bq.fail('division by zero: ' || bq.float_text(a) || ' / ' || bq.float_text(b))
      WHEN isinf(a / b) AND NOT isinf(a) THEN bq.fail('double overflow: /') ELSE a / b END;

CREATE OR REPLACE MACRO bq.safe_divide(a, b) AS CASE WHEN b = 0 OR isinf(a / b) AND NOT isinf(a) THEN NULL ELSE a / b END;

CREATE OR REPLACE MACRO bq.ieee_divide(a, b) AS
    CASE WHEN a IS NULL THEN NULL WHEN b = 0 THEN CASE WHEN isnan(a) OR a = 0 THEN CAST('NaN' AS DOUBLE)
        WHEN (a > 0) = (NOT signbit(b)) THEN CAST('inf' AS DOUBLE) ELSE CAST('-inf' AS DOUBLE) END
      ELSE a / b END;

-- A HUGEINT of billionths. Dividing DECIMALs would go through a DOUBLE.
CREATE OR REPLACE MACRO bq.scaled_numeric(v) AS
    CAST(v // 1000000000 AS DECIMAL(38,9)) + CAST(CAST(v % 1000000000 AS DECIMAL(9,0)) * 0.000000001 AS DECIMAL(38,9));

CREATE OR REPLACE MACRO bq.numeric_quotient(a, b) AS
    sign(a) * sign(b) * bq.scaled_numeric((2 * abs(a) * 1000000000 + abs(b)) // (2 * abs(b)));

-- With HUGEINTs: 9 more digits than requested, rounded half away from zero. Quotients with 20 or more digits are rejected.
CREATE OR REPLACE MACRO bq.numeric_divide(a, b) AS
    CASE WHEN b = 0 AND a IS NOT NULL THEN bq.fail('division by zero')
      WHEN abs(a) >= 10000000000 THEN bq.refuse('NUMERIC division of 10,000,000,000 and more is')
      ELSE bq.numeric_quotient(CAST(CAST(a AS DECIMAL(38,9)) * 1000000000 AS HUGEINT), CAST(CAST(b AS DECIMAL(38,9)) * 1000000000 AS HUGEINT)) END;

-- With HUGEINTs, because DuckDB computes the remainder of DECIMALs as DOUBLEs.
CREATE OR REPLACE MACRO bq.numeric_mod(a, b) AS
    CASE WHEN b = 0 AND a IS NOT NULL THEN bq.fail('division by zero')
      WHEN greatest(abs(a), abs(b)) >= 10000000000000000000 THEN bq.refuse('MOD of NUMERIC of 20 digits before the point is')
      ELSE bq.scaled_numeric(CAST(CAST(a AS DECIMAL(38,9)) * 1000000000 AS HUGEINT) % CAST(CAST(b AS DECIMAL(38,9)) * 1000000000 AS HUGEINT)) END;

-- NULL above the 29 integer digits of a NUMERIC. DuckDB's product has 20 of them.
CREATE OR REPLACE MACRO bq.safe_numeric_multiply(a, b) AS CASE
    WHEN abs(CAST(a AS DOUBLE) * CAST(b AS DOUBLE)) > 1.000001e29 THEN NULL
    WHEN abs(CAST(a AS DOUBLE) * CAST(b AS DOUBLE)) > 9.9e19
      THEN bq.refuse('SAFE_MULTIPLY of NUMERIC above 99,000,000,000,000,000,000 is')
    ELSE CAST(a * b AS DECIMAL(38,9)) END;

CREATE OR REPLACE MACRO bq.div(a, b) AS CASE WHEN b = 0 AND a IS NOT NULL THEN bq.fail('division by zero') ELSE a // b END;

CREATE OR REPLACE MACRO bq.mod(a, b) AS CASE WHEN b = 0 AND a IS NOT NULL THEN bq.fail('division by zero') WHEN b = -1 THEN 0 * a ELSE a % b END;

CREATE OR REPLACE MACRO bq.int_abs(v) AS CASE WHEN v < 0 THEN CAST(0 AS BIGINT) - v ELSE v END;

CREATE OR REPLACE MACRO bq.float_sign(v) AS CASE WHEN isnan(v) THEN v WHEN v > 0 THEN 1e0 WHEN v < 0 THEN -1e0 WHEN v = 0 THEN 0e0 END;

CREATE OR REPLACE MACRO bq.sqrt(v) AS
    CASE WHEN v < 0 THEN bq.fail('Argument to SQRT cannot be negative') ELSE sqrt(v) END;

CREATE OR REPLACE MACRO bq.ln(v) AS CASE WHEN v = CAST('-inf' AS DOUBLE) THEN CAST('NaN' AS DOUBLE)
      WHEN v <= 0 THEN bq.fail('Argument to LN is not positive') ELSE ln(v) END;

CREATE OR REPLACE MACRO bq.log(v, base) AS CASE
      WHEN v IS NULL OR base IS NULL THEN NULL
      WHEN v = CAST('-inf' AS DOUBLE) OR isinf(base) THEN CAST('NaN' AS DOUBLE)
      WHEN v <= 0 OR base <= 0 OR base = 1 THEN bq.fail('Arguments to LOG are not positive')
      WHEN base = 10 THEN log10(v) WHEN base = 2 THEN log2(v) ELSE ln(v) / ln(base) END;

CREATE OR REPLACE MACRO bq.pow(a, b) AS
    CASE WHEN a = 0 AND b = CAST('-inf' AS DOUBLE) THEN CAST('inf' AS DOUBLE)
      WHEN isinf(pow(a, b)) AND NOT isinf(a) AND NOT isinf(b) OR isnan(pow(a, b)) AND NOT isnan(a) AND NOT isnan(b)
      THEN bq.fail('Floating point error in function: POW') ELSE pow(a, b) END;

CREATE OR REPLACE MACRO bq.shift_left(v, n) AS
    CASE WHEN v IS NULL THEN NULL WHEN n < 0 THEN bq.fail('Bitwise binary shift by negative offset')
      WHEN n > 63 THEN 0
      ELSE CAST(CAST(CAST(v AS BIT) AS BIT) << CAST(n AS INTEGER) AS BIGINT) END;

CREATE OR REPLACE MACRO bq.shift_right(v, n) AS
    CASE WHEN v IS NULL THEN NULL WHEN n < 0 THEN bq.fail('Bitwise binary shift by negative offset')
      WHEN n > 63 THEN 0
      ELSE CAST(CAST(CAST(v AS BIT) AS BIT) >> CAST(n AS INTEGER) AS BIGINT) END;

CREATE OR REPLACE MACRO bq.in_domain(v, a, name) AS
    CASE WHEN isnan(v) AND NOT isnan(a) OR isinf(v) AND NOT isinf(a) THEN bq.fail('Floating point error in function: ' || name) ELSE v END;

CREATE OR REPLACE MACRO bq.arc(v, name) AS
    CASE WHEN abs(v) > 1 AND NOT isnan(v) THEN bq.fail('Floating point error in function: ' || name)
      ELSE CASE name WHEN 'ASIN' THEN asin(v) ELSE acos(v) END END;

-- Trigonometric functions: NaN for infinite arguments.
CREATE OR REPLACE MACRO bq.circular(v, name) AS CASE WHEN isinf(v) THEN CAST('NaN' AS DOUBLE)
      ELSE CASE name WHEN 'COS' THEN cos(v) WHEN 'SIN' THEN sin(v) ELSE tan(v) END END;

-- GoogleSQL rounds the stored number: 2.675 is stored as slightly less. DuckDB multiplies first.
CREATE OR REPLACE MACRO bq.is_half(v, digits) AS coalesce(abs(fmod(v * pow(2e0, greatest(least(digits, 323), 0) + 1), 2e0)) = 1, false);

CREATE OR REPLACE MACRO bq.fixed_text(v, digits) AS
    printf('%.' || digits || 'f', CASE WHEN bq.is_half(v, digits) THEN nextafter(v, v * 2) ELSE v END);

-- If the product is far from a half and exact enough, DuckDB's method returns the same result.
CREATE OR REPLACE MACRO bq.is_plainly_rounded(v, digits, half) AS digits BETWEEN 0 AND 15 AND abs(v) < 1000000
    AND abs(abs(v) * pow(1e1, least(greatest(digits, 0), 15))) < 1e12
    AND abs(abs(v) * pow(1e1, least(greatest(digits, 0), 15)) - floor(abs(v) * pow(1e1, least(greatest(digits, 0), 15))) - half) BETWEEN 1e-3 AND 1 - 1e-3;

CREATE OR REPLACE MACRO bq.round_down_to(v, digits, half) AS CASE
    WHEN digits < -22 THEN CASE WHEN abs(v) < 1e22 THEN 0 * v ELSE bq.refuse('ROUND and TRUNC to so many digits are') END
    ELSE sign(v) * (abs(v) - fmod(abs(v), pow(1e1, least(greatest(-digits, 0), 22)))
      + CASE WHEN half AND fmod(abs(v), pow(1e1, least(greatest(-digits, 0), 22))) * 2 >= pow(1e1, least(greatest(-digits, 0), 22)) THEN pow(1e1, least(greatest(-digits, 0), 22)) ELSE 0 END) END;

CREATE OR REPLACE MACRO bq.not_nan(v, name) AS
    CASE WHEN isnan(v) THEN CAST(bq.refuse(name || ' of NaN is') AS DOUBLE) ELSE v END;

CREATE OR REPLACE MACRO bq.statistic(v) AS
    CASE WHEN isinf(v) THEN CAST(bq.refuse('a statistic of numbers so large is') AS DOUBLE) ELSE v END;

CREATE OR REPLACE MACRO bq.round_digits(v, digits) AS CASE
    WHEN v = 0 OR isnan(v) OR isinf(v) OR digits > 323 THEN CASE WHEN digits IS NOT NULL THEN v END
    WHEN bq.is_plainly_rounded(v, digits, 0.5) THEN round(v, CAST(least(greatest(digits, 0), 15) AS INTEGER))
    WHEN digits < 0 THEN bq.round_down_to(v, digits, true)
    ELSE CAST(bq.fixed_text(v, digits) AS DOUBLE) END;

CREATE OR REPLACE MACRO bq.trunc_digits(v, digits) AS CASE
    WHEN v = 0 OR isnan(v) OR isinf(v) OR digits > 323 THEN CASE WHEN digits IS NOT NULL THEN v END
    WHEN bq.is_plainly_rounded(v, digits, 0) THEN trunc(v, CAST(least(greatest(digits, 0), 15) AS INTEGER))
    WHEN digits < 0 THEN bq.round_down_to(v, digits, false)
    ELSE CAST(regexp_replace(printf('%.1100f', v), '(\.[0-9]{' || digits || '})[0-9]*$', '\1') AS DOUBLE) END;

-- The number of bounds, in ascending order, that do not exceed the point.
CREATE OR REPLACE MACRO bq.range_bucket(point, bounds) AS CASE
    WHEN point IS NULL OR bounds IS NULL THEN NULL
    WHEN len(list_filter(bounds, lambda b: b IS NULL)) > 0 OR list_sort(bounds) <> bounds
      THEN bq.fail('Array elements must be in ascending order')
    ELSE CAST(len(list_filter(bounds, lambda b: b <= point)) AS BIGINT) END;

-- The years from 1 to 9999.

CREATE OR REPLACE MACRO bq.from_micros(v) AS CAST(make_timestamp(CAST(v AS BIGINT)) AS TIMESTAMPTZ);

-- A macro copies each argument to every place where it is used, and DuckDB plans every copy. So these use as few copies as possible.
CREATE OR REPLACE MACRO bq.checked_date(v) AS CASE
    WHEN v NOT BETWEEN DATE '0001-01-01' AND DATE '9999-12-31' THEN bq.fail_date('DATE overflow') ELSE v END;

CREATE OR REPLACE MACRO bq.checked_datetime(v) AS CASE
    WHEN v NOT BETWEEN TIMESTAMP '0001-01-01' AND TIMESTAMP '9999-12-31 23:59:59.999999' THEN bq.fail_timestamp('DATETIME overflow') ELSE v END;

CREATE OR REPLACE MACRO bq.checked_local(v) AS CASE
    WHEN v NOT BETWEEN TIMESTAMP '0001-01-01' AND TIMESTAMP '9999-12-31 23:59:59.999999' THEN make_timestamp(bq.refuse('a local time outside of the years 1 to 9999 is')) ELSE v END;

CREATE OR REPLACE MACRO bq.checked_timestamp(v) AS CASE
    WHEN v NOT BETWEEN TIMESTAMPTZ '0001-01-01 00:00:00+00' AND TIMESTAMPTZ '9999-12-31 23:59:59.999999+00'
      THEN CAST(bq.fail_timestamp('Timestamp value is out of allowed range') AS TIMESTAMPTZ) ELSE v END;

CREATE OR REPLACE MACRO bq.checked_micros(us) AS CASE
    WHEN us NOT BETWEEN -62135596800000000 AND 253402300799999999
      THEN CAST(bq.fail_timestamp('Timestamp value is out of allowed range') AS TIMESTAMPTZ)
    ELSE bq.from_micros(us) END;

-- Casts.

CREATE OR REPLACE MACRO bq.numeric_text(v) AS CASE
    WHEN contains(CAST(v AS VARCHAR), '.') THEN regexp_replace(CAST(v AS VARCHAR), '\.?0+$', '') ELSE CAST(v AS VARCHAR) END;

CREATE OR REPLACE MACRO bq.text_int64(v) AS CASE
    WHEN regexp_full_match(v, '\s*[-+]?[0-9]+\s*') AND TRY_CAST(trim(v, E' \t\n\r\f\v') AS BIGINT) IS NOT NULL
      THEN CAST(trim(v, E' \t\n\r\f\v') AS BIGINT)
    WHEN regexp_full_match(v, '\s*[-+]?0[xX][0-9a-fA-F]+\s*')
      THEN bq.refuse('hexadecimal text is')
    WHEN v IS NOT NULL THEN bq.fail('Bad int64 value: ' || v) END;

CREATE OR REPLACE MACRO bq.float_int64(v) AS CASE
    WHEN isnan(v) OR isinf(v) OR v >= 9223372036854775807.0 OR v < -9223372036854775808.0
      THEN bq.fail('Illegal conversion of a non-finite or too large floating point number to an integer')
    ELSE CAST(round(v) AS BIGINT) END;

CREATE OR REPLACE MACRO bq.text_bool(v) AS CASE lower(v)
    WHEN 'true' THEN true WHEN 'false' THEN false
    ELSE CASE WHEN v IS NOT NULL THEN CAST(bq.fail('Bad bool value: ' || v) AS BOOLEAN) END END;

CREATE OR REPLACE MACRO bq.text_float64(v) AS CASE
    WHEN regexp_full_match(lower(v), '\s*[-+]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?|inf|infinity|nan)\s*') THEN CAST(v AS DOUBLE)
    WHEN regexp_full_match(v, '\s*[-+]?0[xX].*') THEN CAST(bq.refuse('hexadecimal text is') AS DOUBLE)
    WHEN v IS NOT NULL THEN bq.fail('Bad double value: ' || v) END;

CREATE OR REPLACE MACRO bq.text_numeric(v) AS CASE
    WHEN regexp_full_match(v, '\s*[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)\s*') THEN CAST(trim(v) AS DECIMAL(38,9))
    WHEN v IS NOT NULL THEN CAST(bq.fail('Invalid NUMERIC value: ' || v) AS DECIMAL(38,9)) END;

CREATE OR REPLACE MACRO bq.float_numeric(v) AS CASE
    WHEN isnan(v) OR isinf(v) THEN CAST(bq.fail('Illegal conversion of non-finite floating point number to NUMERIC') AS DECIMAL(38,9))
    WHEN abs(v) > 1e29 THEN CAST(bq.fail('numeric out of range') AS DECIMAL(38,9))
    WHEN abs(v) > 9007199254740992 THEN CAST(CAST(greatest(least(v, 1e29), -1e29) AS HUGEINT) AS DECIMAL(38,9))
    ELSE CAST(bq.fixed_text(v, 9) AS DECIMAL(38,9)) END;

CREATE OR REPLACE MACRO bq.date_text(v) AS strftime(CAST(v AS TIMESTAMP), '%Y-%m-%d');

-- The fraction has 3 or 6 digits, or is left out.
CREATE OR REPLACE MACRO bq.fraction(us) AS CASE
    WHEN us = 0 THEN '' WHEN us % 1000 = 0 THEN printf('.%03d', us // 1000) ELSE printf('.%06d', us) END;

CREATE OR REPLACE MACRO bq.datetime_text(v) AS
    strftime(v, '%Y-%m-%d %H:%M:%S') || bq.fraction(microsecond(v) % 1000000);

CREATE OR REPLACE MACRO bq.clock_text(v) AS strftime(v, '%H:%M:%S') || bq.fraction(microsecond(v) % 1000000);

CREATE OR REPLACE MACRO bq.time_text(v) AS bq.clock_text(CAST(DATE '1970-01-01' + v AS TIMESTAMP));

CREATE OR REPLACE MACRO bq.timestamp_text(v) AS bq.datetime_text(CAST(v AS TIMESTAMP)) || '+00';

CREATE OR REPLACE MACRO bq.offset_text(minutes) AS
    CASE WHEN minutes < 0 THEN '-' ELSE '+' END || printf('%02d', abs(minutes) // 60)
      || CASE WHEN abs(minutes) % 60 = 0 THEN '' ELSE printf(':%02d', abs(minutes) % 60) END;

-- Names in the tz database. DuckDB also accepts others, such as PST.
CREATE OR REPLACE MACRO bq.is_zone(name) AS regexp_full_match(name, '[A-Z][A-Za-z0-9_+-]*(/[A-Z][A-Za-z0-9_+-]*)*')
    AND NOT regexp_full_match(name, 'A[CEGRS]T|B[ES]T|C[ANST]T|E[AC]T|I[ES]T|JST|MIT|N[ES]T|P[LNRS]T|[SV]ST|GMT[-+]([1-9].*|0.+)|SystemV/.*|US/Pacific-New|Canada/East-Saskatchewan');

-- DuckDB accepts zones only by name.
CREATE OR REPLACE MACRO bq.zone(name) AS CASE
    WHEN regexp_full_match(name, '[-+][0-9]{1,2}(:?[0-9]{2})?')
      THEN CASE WHEN regexp_full_match(name, '[-+]0?0(:?00)?') THEN 'UTC'
        WHEN regexp_full_match(name, '[-](0?[1-9]|1[0-2])(:00)?|[+](0?[1-9]|1[0-4])(:00)?')
          THEN 'Etc/GMT' || translate(name[1], '-+', '+-') || regexp_extract(name, '^.0?([0-9]+)', 1)
        ELSE CAST(bq.refuse('this zone by its offset is') AS VARCHAR) END
    WHEN regexp_full_match(name, 'UTC[-+].*') THEN CAST(bq.refuse('this zone by its offset is') AS VARCHAR)
    WHEN bq.is_zone(name) THEN name
    WHEN name IS NOT NULL THEN CAST(bq.fail('Invalid time zone: ' || name) AS VARCHAR) END;

-- Seconds in an offset, such as in local mean times, are dropped.
CREATE OR REPLACE MACRO bq.local_minutes(zone, v) AS bq.checked_local(CAST(bq.from_micros(
    epoch_us(v) + (epoch_us(timezone(zone, v)) - epoch_us(v)) // 60000000 * 60000000) AS TIMESTAMP));

CREATE OR REPLACE MACRO bq.timestamp_text_at(v, zone) AS bq.datetime_text(bq.local_minutes(zone, v))
    || bq.offset_text((epoch_us(timezone(zone, v)) - epoch_us(v)) // 60000000);

-- A local time, using the previous day's offset.
CREATE OR REPLACE MACRO bq.before_change(zone, v) AS bq.from_micros(epoch_us(v)
    - (epoch_us(timezone(zone, timezone(zone, v) - to_days(1))) - epoch_us(timezone(zone, v) - to_days(1))));

-- If two moments have the same local time, because clocks go back, GoogleSQL uses the first and DuckDB the second.
CREATE OR REPLACE MACRO bq.at_zone(zone, v) AS bq.checked_timestamp(CASE
    WHEN timezone(zone, bq.before_change(zone, v)) = v THEN bq.before_change(zone, v) ELSE timezone(zone, v) END);

-- The same with one copy of each argument. A list for each row takes five times as long, so it is for constants.
CREATE OR REPLACE MACRO bq.constant_at_zone(zone, v) AS
    list_extract(list_transform([{'zone': zone, 'local': v}], lambda s: bq.at_zone(s.zone, s.local)), 1);

CREATE OR REPLACE MACRO bq.text_date(v) AS CASE
    WHEN regexp_full_match(v, '[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}') THEN bq.checked_date(CAST(v AS DATE))
    WHEN v IS NOT NULL THEN bq.fail_date('Invalid date: ''' || v || '''') END;

CREATE OR REPLACE MACRO bq.text_datetime(v) AS CASE
    WHEN regexp_full_match(v, '[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([ Tt]([01]?[0-9]|2[0-3]):[0-9]{1,2}:[0-9]{1,2}(\.[0-9]{1,6})?)?') THEN bq.checked_datetime(CAST(replace(v, 't', 'T') AS TIMESTAMP))
    WHEN v IS NOT NULL THEN bq.fail_timestamp('Invalid datetime string "' || v || '"') END;

CREATE OR REPLACE MACRO bq.text_time(v) AS CASE
    WHEN regexp_full_match(v, '([01]?[0-9]|2[0-3]):[0-9]{1,2}:[0-9]{1,2}(\.[0-9]{1,6})?') THEN CAST(v AS TIME)
    WHEN v IS NOT NULL THEN CAST(bq.fail_timestamp('Invalid time string "' || v || '"') AS TIME) END;

-- A lambda evaluates its arguments once. A macro copies them for every use, which makes a long plan.
CREATE OR REPLACE MACRO bq.text_timestamp(v) AS CASE
    WHEN regexp_full_match(v, '[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([ Tt]([01]?[0-9]|2[0-3]):[0-9]{1,2}:[0-9]{1,2}(\.[0-9]{1,6})?)?(Z|z|[-+](0?[0-9]|1[0-3])(:[0-5][0-9])?|[-+]14(:00)?)?')
      THEN CASE WHEN left(v, 4) IN ('0000', '0001', '9999')
        THEN bq.checked_timestamp(CAST(replace(replace(v, 't', 'T'), 'z', 'Z') AS TIMESTAMPTZ))
        ELSE CAST(replace(replace(v, 't', 'T'), 'z', 'Z') AS TIMESTAMPTZ) END
    WHEN regexp_full_match(v, '[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}[ Tt]([01]?[0-9]|2[0-3]):[0-9]{1,2}:[0-9]{1,2}(\.[0-9]{1,6})? [A-Z][A-Za-z0-9_+/-]*')
      THEN list_extract(list_transform([{'zone': bq.zone(nullif(regexp_extract(v, ' ([A-Z][A-Za-z0-9_+/-]*)$', 1), '')),
          'local': CAST(replace(regexp_replace(v, ' [^ ]*$', ''), 't', 'T') AS TIMESTAMP)}], lambda s: bq.at_zone(s.zone, s.local)), 1)
    WHEN v IS NOT NULL THEN CAST(bq.fail_timestamp('Invalid timestamp: ''' || v || '''') AS TIMESTAMPTZ) END;

CREATE OR REPLACE MACRO bq.text_timestamp_at(v, zone) AS CASE
    WHEN regexp_full_match(v, '[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([ Tt]([01]?[0-9]|2[0-3]):[0-9]{1,2}:[0-9]{1,2}(\.[0-9]{1,6})?)?') THEN bq.at_zone(zone, CAST(replace(v, 't', 'T') AS TIMESTAMP))
    WHEN bq.text_timestamp(v) IS NOT NULL THEN CAST(bq.fail_timestamp('Timezone is not allowed in "' || v || '"') AS TIMESTAMPTZ) END;

-- Text.

-- Sums must not overflow, even in a branch that is not taken, because DuckDB computes constants first.
CREATE OR REPLACE MACRO bq.substr(v, position) AS
    CASE WHEN position IS NULL THEN NULL
      WHEN position < 0 THEN substring(v, greatest(len(v) + 1 + least(position, 0), 1))
      ELSE substring(v, least(greatest(position, 1), 2147483647)) END,
  (v, position, size) AS CASE
    WHEN position IS NULL OR size IS NULL OR v IS NULL THEN NULL
    WHEN size < 0 THEN CAST(bq.fail('Third argument in SUBSTR() cannot be negative') AS VARCHAR)
    WHEN position < 0 THEN substring(v, greatest(len(v) + 1 + least(position, 0), 1), least(size, 2147483647))
    ELSE substring(v, least(greatest(position, 1), 2147483647), least(size, 2147483647)) END;

CREATE OR REPLACE MACRO bq.split(v, separator) AS CASE WHEN separator IS NOT NULL THEN string_split(v, separator) END;

CREATE OR REPLACE MACRO bq.trim_spaces(v) AS regexp_replace(regexp_replace(v, '^[\s\p{Z}\x{85}\x{b}]+', ''), '[\s\p{Z}\x{85}\x{b}]+$', '');

CREATE OR REPLACE MACRO bq.ltrim_spaces(v) AS regexp_replace(v, '^[\s\p{Z}\x{85}\x{b}]+', '');

CREATE OR REPLACE MACRO bq.rtrim_spaces(v) AS regexp_replace(v, '[\s\p{Z}\x{85}\x{b}]+$', '');

CREATE OR REPLACE MACRO bq.lpad(v, size, pad) AS
    CASE WHEN v IS NULL OR size IS NULL OR pad IS NULL THEN NULL WHEN size < 0 OR pad = '' OR size > 1048576 THEN CAST(bq.fail('LPAD: bad length or pattern') AS VARCHAR) ELSE lpad(v, CAST(size AS INTEGER), pad) END;

CREATE OR REPLACE MACRO bq.rpad(v, size, pad) AS
    CASE WHEN v IS NULL OR size IS NULL OR pad IS NULL THEN NULL WHEN size < 0 OR pad = '' OR size > 1048576 THEN CAST(bq.fail('RPAD: bad length or pattern') AS VARCHAR) ELSE rpad(v, CAST(size AS INTEGER), pad) END;

CREATE OR REPLACE MACRO bq.replace(v, old, new) AS CASE WHEN old = '' AND new IS NOT NULL THEN v ELSE replace(v, old, new) END;

CREATE OR REPLACE MACRO bq.repeat(v, times) AS
    CASE WHEN v IS NULL THEN NULL WHEN times > 1048576 OR times * strlen(v) > 1048576
        THEN CAST(bq.fail('Output of REPEAT exceeds max allowed output size of 1MB') AS VARCHAR)
      WHEN times < 0 THEN CAST(bq.fail('Second argument in REPEAT() cannot be negative') AS VARCHAR) ELSE repeat(v, times) END;

CREATE OR REPLACE MACRO bq.left(v, size) AS
    CASE WHEN v IS NULL THEN NULL WHEN size < 0 THEN CAST(bq.fail('Second argument in LEFT() cannot be negative') AS VARCHAR) WHEN size IS NOT NULL THEN left(v, least(size, 2147483647)) END;

CREATE OR REPLACE MACRO bq.right(v, size) AS
    CASE WHEN v IS NULL THEN NULL WHEN size < 0 THEN CAST(bq.fail('Second argument in RIGHT() cannot be negative') AS VARCHAR)
      WHEN size = 0 THEN left(v, 0) WHEN size IS NOT NULL THEN right(v, least(size, 2147483647)) END;

-- Spaces and missing characters at the end do not matter.
CREATE OR REPLACE MACRO bq.padded_base64(v) AS rpad(v, CAST((length(v) + 3) // 4 * 4 AS INTEGER), '=');

CREATE OR REPLACE MACRO bq.from_base64(v) AS from_base64(bq.padded_base64(regexp_replace(v, '\s', '', 'g')));

CREATE OR REPLACE MACRO bq.ascii(v) AS CASE WHEN v = '' THEN 0
    WHEN ascii(v) > 127 THEN bq.fail('Argument to ASCII is not a structurally valid ASCII string: ' || v)
    ELSE CAST(ascii(v) AS BIGINT) END;

-- DuckDB maps each letter to one letter; GoogleSQL maps ß to SS.
CREATE OR REPLACE MACRO bq.upper(v) AS CASE
    WHEN strlen(v) = length(v) THEN upper(v)
    WHEN regexp_matches(v, '[\x{149}\x{1F0}\x{390}\x{3B0}\x{587}\x{1E96}-\x{1E9A}\x{1F50}-\x{1FFC}\x{FB00}-\x{FB17}]')
      THEN CAST(bq.refuse('UPPER of a letter that becomes several is') AS VARCHAR)
    ELSE upper(replace(v, 'ß', 'SS')) END;

-- DuckDB has only one form of the lowercase sigma, and drops a dot on the lowercase i.
CREATE OR REPLACE MACRO bq.lower(v) AS CASE WHEN strlen(v) <> length(v) AND regexp_matches(v, '[Σİ]')
    THEN CAST(bq.refuse('LOWER of Σ and İ is') AS VARCHAR) ELSE lower(v) END;

-- In DuckDB, combining marks stay after their letters.
CREATE OR REPLACE MACRO bq.reverse(v) AS CASE WHEN strlen(v) <> length(v) AND regexp_matches(v, '\p{M}|\x{200D}|[\x{1F1E6}-\x{1F1FF}]|[\x{1F3FB}-\x{1F3FF}]|[\x{1100}-\x{11FF}]')
    THEN array_to_string(list_reverse(string_split(v, '')), '') ELSE reverse(v) END;

CREATE OR REPLACE MACRO bq.format_digits(pattern, v) AS
    CASE WHEN v = -9223372036854775808 THEN CAST(bq.refuse('FORMAT of this number is') AS VARCHAR)
      WHEN v < 0 THEN '-' || printf(pattern, -v) ELSE printf(pattern, v) END;

CREATE OR REPLACE MACRO bq.regexp_extract(v, pattern, part) AS
    CASE WHEN v IS NOT NULL AND regexp_matches(v, pattern) THEN regexp_extract(v, pattern, part) END;

-- NULL if the group is not part of the match, which DuckDB reports only for all matches.
CREATE OR REPLACE MACRO bq.regexp_extract_group(v, pattern) AS list_extract(regexp_extract_all(v, pattern, 1), 1);

CREATE OR REPLACE MACRO bq.regexp_extract_groups(v, pattern) AS
    list_transform(regexp_extract_all(v, pattern, 1), lambda e: coalesce(e, ''));

CREATE OR REPLACE MACRO bq.regexp_instr(v, pattern, before) AS
    CASE WHEN regexp_matches(v, pattern) THEN CAST(length(regexp_extract(v, before, 1)) + 1 AS BIGINT) WHEN v IS NOT NULL THEN 0 END;

CREATE OR REPLACE MACRO bq.format_float(pattern, v) AS CASE
    WHEN isnan(v) OR isinf(v) THEN CAST(bq.refuse('FORMAT of NaN and inf is') AS VARCHAR)
    ELSE printf(pattern, v) END;

CREATE OR REPLACE MACRO bq.translate(v, old, new) AS CASE
    WHEN len(list_distinct(string_split(old, ''))) < length(old)
      THEN CAST(bq.fail('Duplicate character in TRANSLATE source characters') AS VARCHAR)
    ELSE translate(v, old, new) END;

CREATE OR REPLACE MACRO bq.instr(v, wanted, position, occurrence) AS CASE
    WHEN v IS NULL OR wanted IS NULL OR position IS NULL OR occurrence IS NULL THEN NULL
    WHEN position < 1 THEN bq.refuse('INSTR from a position that is not above 0 is')
    WHEN occurrence < 1 THEN bq.fail('Occurrence must be positive')
    WHEN wanted = '' THEN bq.refuse('INSTR of an empty text is')
    ELSE coalesce(list_extract(list_filter(range(position, length(v) - length(wanted) + 2),
        lambda p: substring(v, p, length(wanted)) = wanted), occurrence), 0) END;

CREATE OR REPLACE MACRO bq.code_points(v) AS CASE WHEN v = '' THEN CAST([] AS BIGINT[])
    ELSE list_transform(string_split(v, ''), lambda c: CAST(unicode(c) AS BIGINT)) END;

CREATE OR REPLACE MACRO bq.code_points_text(points) AS CASE
    WHEN len(list_filter(points, lambda p: p IS NULL)) > 0 THEN NULL
    WHEN len(list_filter(points, lambda p: p < 0 OR p > 1114111 OR p BETWEEN 55296 AND 57343)) > 0
      THEN CAST(bq.fail('Invalid codepoint') AS VARCHAR)
    WHEN points IS NOT NULL
      -- A code point of 0 yields no character.
      THEN array_to_string(list_transform(list_filter(points, lambda p: p <> 0),
        lambda p: chr(CAST(greatest(0, least(p, 1114111)) AS INTEGER))), '') END;

-- Only some Unicode spaces separate words in GoogleSQL.
CREATE OR REPLACE MACRO bq.initcap(v, words) AS CASE
    WHEN regexp_matches(v, '[\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}]')
      THEN CAST(bq.refuse('INITCAP of a space beyond ASCII is') AS VARCHAR)
    ELSE array_to_string(list_transform(regexp_extract_all(v, words),
        lambda w: replace(upper(substring(w, 1, 1)), 'ẞ', substring(w, 1, 1)) || lower(substring(w, 2))), '') END;

-- The result starts with the digit of the first letter, if it has one. Repeated digits are dropped, also after vowels.
CREATE OR REPLACE MACRO bq.soundex_digits(letters) AS
    regexp_replace(regexp_replace(regexp_replace(regexp_replace(regexp_replace(regexp_replace(
      translate(upper(letters), 'BFPVCGJKQSXZDTLMNRAEIOUHWY', '111122222222334556'),
      '1+', '1', 'g'), '2+', '2', 'g'), '3+', '3', 'g'), '4+', '4', 'g'), '5+', '5', 'g'), '6+', '6', 'g');

CREATE OR REPLACE MACRO bq.letters_soundex(letters) AS substring(letters, 1, 1) || rpad(substring(
    bq.soundex_digits(letters), CASE WHEN regexp_matches(letters, '^[AEIOUHWYaeiouhwy]') THEN 1 ELSE 2 END, 3), 3, '0');

CREATE OR REPLACE MACRO bq.soundex(v) AS CASE WHEN regexp_matches(v, '[A-Za-z]')
    THEN bq.letters_soundex(regexp_replace(v, '[^A-Za-z]', '', 'g')) WHEN v IS NOT NULL THEN '' END;

-- BYTES as hex digits, two per byte.
CREATE OR REPLACE MACRO bq.byte_digits(v) AS regexp_extract_all(to_hex(v), '..');

-- DuckDB's own message may be cut inside a character, and older Python versions return it as empty.
CREATE OR REPLACE MACRO bq.from_hex(v) AS CASE WHEN v IS NULL THEN NULL WHEN regexp_full_match(v, '[0-9A-Fa-f]*') THEN from_hex(v)
  ELSE CAST(CAST(bq.fail('Failed to decode invalid hexadecimal string due to character at offset ' || length(regexp_extract(v, '^[0-9A-Fa-f]*'))
    || ': ' || v) AS VARCHAR) AS BLOB) END;

CREATE OR REPLACE MACRO bq.reverse_bytes(v) AS from_hex(array_to_string(list_reverse(bq.byte_digits(v)), ''));

CREATE OR REPLACE MACRO bq.byte_points(v) AS list_transform(bq.byte_digits(v), lambda d: CAST('0x' || d AS BIGINT));

CREATE OR REPLACE MACRO bq.code_points_bytes(points) AS CASE
    WHEN len(list_filter(points, lambda p: p IS NULL)) > 0 THEN NULL
    WHEN len(list_filter(points, lambda p: p < 0 OR p > 255)) > 0 THEN CAST(CAST(bq.fail('Invalid extended ASCII code point') AS VARCHAR) AS BLOB)
    WHEN points IS NOT NULL THEN from_hex(array_to_string(list_transform(points, lambda p: printf('%02x', p)), '')) END;

-- Start position of the requested bytes, from 0.
CREATE OR REPLACE MACRO bq.byte_start(v, position) AS
    CASE WHEN position < 0 THEN greatest(octet_length(v) + position, 0) ELSE least(greatest(position, 1) - 1, octet_length(v)) END;

CREATE OR REPLACE MACRO bq.substr_bytes(v, position) AS CASE WHEN position IS NOT NULL THEN from_hex(substring(to_hex(v), 2 * bq.byte_start(v, position) + 1)) END,
  (v, position, size) AS CASE
    WHEN position IS NULL OR size IS NULL OR v IS NULL THEN NULL
    WHEN size < 0 THEN CAST(CAST(bq.fail('Third argument in SUBSTR() cannot be negative') AS VARCHAR) AS BLOB)
    ELSE from_hex(substring(to_hex(v), 2 * bq.byte_start(v, position) + 1, 2 * least(size, octet_length(v)))) END;

CREATE OR REPLACE MACRO bq.left_bytes(v, size) AS
    CASE WHEN v IS NULL THEN NULL WHEN size < 0 THEN CAST(CAST(bq.fail('Second argument in LEFT() cannot be negative') AS VARCHAR) AS BLOB) WHEN size IS NOT NULL THEN from_hex(substring(to_hex(v), 1, 2 * least(size, octet_length(v)))) END;

CREATE OR REPLACE MACRO bq.right_bytes(v, size) AS
    CASE WHEN v IS NULL THEN NULL WHEN size < 0 THEN CAST(CAST(bq.fail('Second argument in RIGHT() cannot be negative') AS VARCHAR) AS BLOB)
      WHEN size IS NOT NULL THEN from_hex(substring(to_hex(v), 2 * greatest(octet_length(v) - least(size, octet_length(v)), 0) + 1)) END;

-- Arrays.

-- Like OR over all of them: true if any is true, otherwise NULL if any is NULL.
CREATE OR REPLACE MACRO bq.any_true(list) AS CASE
    WHEN list_contains(list, true) THEN true WHEN list_count(list) < len(list) THEN NULL WHEN list IS NOT NULL THEN false END;

-- The most frequent values, including NULL, with negated counts, so that the most frequent come first.
CREATE OR REPLACE MACRO bq.top_count(list, most) AS CASE WHEN list IS NOT NULL THEN list_slice(list_sort(list_concat(
    list_transform(map_entries(list_aggregate(list, 'histogram')), lambda e: {'c': -CAST(e.value AS BIGINT), 'v': e.key}),
    CASE WHEN list_count(list) < len(list) THEN [{'c': CAST(list_count(list) AS BIGINT) - len(list), 'v': list_extract(list, 0)}] END)), 1, most) END;

CREATE OR REPLACE MACRO bq.at(list, position) AS CASE
    WHEN position < 1 OR position > len(list)
      THEN list_extract(list, CAST(bq.fail('Array index ' || (position - 1) || ' is out of bounds') AS BIGINT))
    ELSE list_extract(list, position) END;

CREATE OR REPLACE MACRO bq.safe_at(list, position) AS
    list_extract(list, CASE WHEN position >= 1 AND position <= len(list) THEN position END);

-- An offset may be the maximum number, to which nothing can be added.
CREATE OR REPLACE MACRO bq.at_offset(list, position) AS CASE
    WHEN position < 0 OR position >= len(list)
      THEN list_extract(list, CAST(bq.fail('Array index ' || position || ' is out of bounds') AS BIGINT))
    ELSE list_extract(list, position + 1) END;

CREATE OR REPLACE MACRO bq.safe_at_offset(list, position) AS
    list_extract(list, CASE WHEN position >= 0 AND position < len(list) THEN position + 1 END);

CREATE OR REPLACE MACRO bq.array_text(list, separator) AS
    CASE WHEN separator IS NOT NULL THEN array_to_string(list, separator) END;

CREATE OR REPLACE MACRO bq.filled_array_text(list, separator, filling) AS CASE WHEN separator IS NOT NULL AND filling IS NOT NULL
    THEN array_to_string(list_transform(list, lambda e: coalesce(e, filling)), separator) END;

CREATE OR REPLACE MACRO bq.array_concat(a, b) AS CASE WHEN a IS NOT NULL AND b IS NOT NULL THEN list_concat(a, b) END;

-- Each element is the first one and a multiple of the step, not the sum of steps.
CREATE OR REPLACE MACRO bq.stepped(a, b, step) AS list_filter(
    list_transform(range(CAST(greatest(floor(CAST((b - a) AS DOUBLE) / CAST(step AS DOUBLE)), -2) AS BIGINT) + 2), lambda i: a + i * step),
    lambda e: CASE WHEN step > 0 THEN e <= b ELSE e >= b END);

CREATE OR REPLACE MACRO bq.generate_numbers(a, b, step) AS CASE
    WHEN a IS NULL OR b IS NULL OR step IS NULL THEN NULL
    WHEN step = 0 THEN [a + bq.fail('Sequence step cannot be 0.')]
    WHEN abs(CAST((b - a) AS DOUBLE) / CAST(step AS DOUBLE)) >= 1048575 AND (b > a) = (step > 0)
      THEN [a + bq.fail('Cannot generate arrays with more than 1048575 elements.')]
    WHEN a = b THEN [a]
    WHEN (b > a) <> (step > 0) THEN []
    ELSE bq.stepped(a, b, step) END;

CREATE OR REPLACE MACRO bq.generate_floats(a, b, step) AS CASE
    WHEN a IS NULL OR b IS NULL OR step IS NULL THEN NULL
    WHEN isnan(a) OR isnan(b) OR isnan(step) THEN [a + bq.fail('Sequence start, end, and step cannot be NaN.')]
    WHEN isinf(step) THEN [a + bq.fail('Sequence step cannot be +/-inf.')]
    WHEN isinf(a) AND (b > a) <> (step > 0) THEN []
    ELSE bq.generate_numbers(a, b, step) END;

CREATE OR REPLACE MACRO bq.generate_array(a, b, step) AS CASE
    WHEN step = 0 THEN generate_series(a, b, CAST(bq.fail('Sequence step cannot be 0.') AS BIGINT))
    ELSE generate_series(a, b, step) END;

-- Dates and times. DuckDB's date_trunc and + return a TIMESTAMP for a DATE.

CREATE OR REPLACE MACRO bq.date_at(zone, v) AS bq.checked_date(CAST(timezone(zone, v) AS DATE));

CREATE OR REPLACE MACRO bq.datetime_at(zone, v) AS bq.checked_datetime(timezone(zone, v));

CREATE OR REPLACE MACRO bq.add_days(v, days) AS bq.checked_date(CAST(v + to_days(CAST(days AS INTEGER)) AS DATE));

CREATE OR REPLACE MACRO bq.date_add_months(v, months) AS bq.checked_date(CAST(v + to_months(CAST(months AS INTEGER)) AS DATE));

CREATE OR REPLACE MACRO bq.datetime_add_months(v, months) AS bq.checked_datetime(v + to_months(CAST(months AS INTEGER)));

CREATE OR REPLACE MACRO bq.datetime_add_us(v, us) AS bq.checked_datetime(make_timestamp(epoch_us(v) + us));

CREATE OR REPLACE MACRO bq.timestamp_add_us(v, us) AS bq.checked_micros(epoch_us(v) + us);

CREATE OR REPLACE MACRO bq.trunc_date(unit, v, shift) AS
    bq.checked_date(CAST(date_trunc(unit, v + to_days(shift)) - to_days(shift) AS DATE));

-- For a DATETIME or a TIMESTAMP: truncation may lead to a time before year 1.
CREATE OR REPLACE MACRO bq.trunc_moment(unit, v, shift) AS CASE
    WHEN v < TIMESTAMP '0002-01-01' AND date_trunc(unit, v + to_days(shift)) - to_days(shift) < TIMESTAMP '0001-01-01'
      THEN bq.fail_timestamp('Truncating resulted in an out of range value')
    ELSE date_trunc(unit, v + to_days(shift)) - to_days(shift) END;

CREATE OR REPLACE MACRO bq.trunc_time(unit, v, shift) AS
    CAST(date_trunc(unit, CAST(DATE '1970-01-01' + v AS TIMESTAMP)) AS TIME);

-- An hour or less is truncated in local time, so that the second of two equal hours is not moved to the first.
CREATE OR REPLACE MACRO bq.trunc_at(unit, v, shift, zone) AS CASE
    WHEN unit IN ('hour', 'minute', 'second', 'millisecond', 'microsecond')
      THEN bq.checked_micros(epoch_us(v) - (epoch_us(timezone(zone, v)) - epoch_us(date_trunc(unit, timezone(zone, v)))))
    ELSE bq.at_zone(zone, date_trunc(unit, timezone(zone, v) + to_days(shift)) - to_days(shift)) END;

-- Start of the bucket that contains a moment. Buckets are counted from an origin.
CREATE OR REPLACE MACRO bq.bucket_us(v, us, origin) AS CASE
    WHEN v IS NULL OR origin IS NULL THEN NULL
    WHEN us <= 0 THEN bq.fail('Bucket width must be positive')
    ELSE epoch_us(v) - ((epoch_us(v) - epoch_us(origin)) % us + us) % us END;

CREATE OR REPLACE MACRO bq.months_between(v, origin) AS (year(v) - year(origin)) * 12 + month(v) - month(origin);

CREATE OR REPLACE MACRO bq.months_bucket(v, months, origin) AS CASE
    WHEN v IS NULL OR origin IS NULL THEN NULL
    WHEN months <= 0 THEN make_timestamp(bq.fail('Bucket width must be positive'))
    WHEN origin + to_months(CAST(bq.months_between(v, origin) - (bq.months_between(v, origin) % months + months) % months AS INTEGER)) > v
      THEN origin + to_months(CAST(bq.months_between(v, origin) - (bq.months_between(v, origin) % months + months) % months - months AS INTEGER))
    ELSE origin + to_months(CAST(bq.months_between(v, origin) - (bq.months_between(v, origin) % months + months) % months AS INTEGER)) END;

-- DATE_DIFF and DATETIME_DIFF count the boundaries between two moments, TIMESTAMP_DIFF the whole units.
-- Truncated to the unit first, because DuckDB counts whole weeks.
CREATE OR REPLACE MACRO bq.date_diff(unit, later, earlier, shift) AS
    date_diff(unit, date_trunc(unit, earlier + to_days(shift)), date_trunc(unit, later + to_days(shift)));

CREATE OR REPLACE MACRO bq.timestamp_diff(unit_us, later, earlier) AS
    (epoch_us(later) - epoch_us(earlier)) // unit_us;

-- Rounded down, before 1970 too.
CREATE OR REPLACE MACRO bq.unix(v, unit_us) AS
    CAST((epoch_us(v) - ((epoch_us(v) % unit_us) + unit_us) % unit_us) // unit_us AS BIGINT);

-- The days before the year's first day of a week are week 0.
CREATE OR REPLACE MACRO bq.week_of_year(v, shift) AS
    (dayofyear(v) - 1 + (isodow(date_trunc('year', v)) - 1 + shift) % 7) // 7
      + CASE WHEN (isodow(date_trunc('year', v)) - 1 + shift) % 7 = 0 THEN 1 ELSE 0 END;

CREATE OR REPLACE MACRO bq.make_date(y, m, d) AS bq.checked_date(make_date(y, m, d));

CREATE OR REPLACE MACRO bq.make_datetime(y, m, d, hh, mm, ss) AS CASE
    WHEN y IS NULL OR m IS NULL OR d IS NULL OR hh IS NULL OR mm IS NULL OR ss IS NULL THEN NULL
    WHEN ss = 60 THEN make_timestamp(bq.refuse('a leap second is'))
    WHEN hh NOT BETWEEN 0 AND 23 THEN bq.fail_timestamp('Input calculates to invalid datetime')
    ELSE bq.checked_datetime(make_timestamp(y, m, d, hh, mm, CAST(ss AS DOUBLE))) END;

CREATE OR REPLACE MACRO bq.make_time(hh, mm, ss) AS CASE
    WHEN hh IS NULL OR mm IS NULL OR ss IS NULL THEN NULL
    WHEN ss = 60 THEN CAST(make_timestamp(bq.refuse('a leap second is')) AS TIME)
    WHEN hh NOT BETWEEN 0 AND 23 THEN CAST(bq.fail_timestamp('Input calculates to invalid time') AS TIME)
    ELSE make_time(hh, mm, CAST(ss AS DOUBLE)) END;

CREATE OR REPLACE MACRO bq.last_day(unit, v, months) AS
    CAST(date_trunc(unit, v) + to_months(months) - to_days(1) AS DATE);

CREATE OR REPLACE MACRO bq.date_array(a, b, step) AS CASE
    WHEN step = to_days(0) THEN CAST([bq.fail_date('Sequence step cannot be 0.')] AS DATE[])
    ELSE CAST(generate_series(CAST(a AS TIMESTAMP), CAST(b AS TIMESTAMP), step) AS DATE[]) END;

CREATE OR REPLACE MACRO bq.timestamp_array(a, b, step) AS CASE
    WHEN step = to_days(0) THEN CAST([bq.fail_timestamp('Sequence step cannot be 0.')] AS TIMESTAMPTZ[])
    ELSE CAST(generate_series(CAST(a AS TIMESTAMP), CAST(b AS TIMESTAMP), step) AS TIMESTAMPTZ[]) END;

CREATE OR REPLACE MACRO bq.last_day_of_week(v, shift) AS
    bq.checked_date(CAST(date_trunc('week', v + to_days(shift)) - to_days(shift) + to_days(6) AS DATE));

-- After midnight, a clock starts over.
CREATE OR REPLACE MACRO bq.time_add_us(v, us) AS
    CAST(make_timestamp(((epoch_us(v) + us % 86400000000) % 86400000000 + 86400000000) % 86400000000) AS TIME);

CREATE OR REPLACE MACRO bq.clock_diff(unit_us, later, earlier) AS epoch_us(later) // unit_us - epoch_us(earlier) // unit_us;

CREATE OR REPLACE MACRO bq.offset_digits(local, v, colon) AS
    CASE WHEN epoch_us(local) < epoch_us(CAST(v AS TIMESTAMP)) THEN '-' ELSE '+' END
      || printf('%02d', abs(epoch_us(local) - epoch_us(CAST(v AS TIMESTAMP))) // 3600000000) || colon
      || printf('%02d', abs(epoch_us(local) - epoch_us(CAST(v AS TIMESTAMP))) // 60000000 % 60);

CREATE OR REPLACE MACRO bq.six_digits(v) AS regexp_replace(v, '(\.[0-9]{6})[0-9]+', '\1');

-- A text that ends with an offset from UTC: the part before it, and the moment that both define.
CREATE OR REPLACE MACRO bq.before_offset(v, pattern, before) AS CASE
    WHEN regexp_matches(v, before || '(?:' || pattern || ')\s*$') THEN regexp_replace(v, '(?:' || pattern || ')\s*$', '')
    WHEN v IS NOT NULL THEN CAST(bq.fail('Failed to parse input string "' || v || '"') AS VARCHAR) END;

CREATE OR REPLACE MACRO bq.offset_minutes(digits) AS
    CAST(digits[2:3] AS BIGINT) * 60 + CAST(coalesce(nullif(regexp_extract(digits, '^...:?([0-9][0-9])$', 1), ''), '0') AS BIGINT);

CREATE OR REPLACE MACRO bq.minus_offset(local, v, pattern) AS bq.checked_micros(epoch_us(local) - CASE
    regexp_extract(v, '(' || pattern || ')\s*$', 1)[1] WHEN '+' THEN 60000000 WHEN '-' THEN -60000000 ELSE 0 END
      * coalesce(TRY(bq.offset_minutes(regexp_extract(v, '(' || pattern || ')\s*$', 1))), 0));

CREATE OR REPLACE MACRO bq.seconds_text(v) AS
    strftime(v, '%S') || rtrim(rtrim(printf('.%06d', microsecond(v) % 1000000), '0'), '.');

-- JSON.

CREATE OR REPLACE MACRO bq.json_value(v, path) AS
    CASE WHEN json_type(v, path) NOT IN ('OBJECT', 'ARRAY') THEN json_extract_string(v, path) END;

CREATE OR REPLACE MACRO bq.json_string(v) AS CASE
    WHEN json_type(v) = 'VARCHAR' THEN json_extract_string(v, '$')
    WHEN v IS NOT NULL THEN CAST(bq.fail('The provided JSON input is not a string') AS VARCHAR) END;

-- DuckDB writes 1.50 as 1.5. A number in a STRING keeps its digits: it is inserted as text, with a mark that can't occur in a STRING here.
CREATE OR REPLACE MACRO bq.json_marked(v, mark) AS array_to_string(list_transform(
    regexp_extract_all(v, '"(?:[^"\\]|\\.)*"|-?[0-9][-+.0-9eE]*|[^"0-9-]+'),
    lambda t: CASE WHEN regexp_matches(t, '^[-0-9]') THEN '"' || mark || t || '"' ELSE t END), '');

-- JSON without the content of quotes.
CREATE OR REPLACE MACRO bq.json_bare(v) AS regexp_replace(v, '"(?:[^"\\]|\\.)*"', '""', 'g');

-- DuckDB accepts commas before a bracket, NaN and inf.
CREATE OR REPLACE MACRO bq.is_loose_json(v) AS
    regexp_matches(v, ',\s*[\]}]|(?i)nan|inf') AND regexp_matches(bq.json_bare(v), ',\s*[\]}]|(?i)nan|inf');

-- GoogleSQL reads a text up to its first error.
CREATE OR REPLACE MACRO bq.json_or_null(v, path) AS CASE
    WHEN TRY_CAST(v AS JSON) IS NOT NULL AND NOT bq.is_loose_json(v) THEN CAST(v AS JSON)
    WHEN regexp_matches(v, CASE WHEN path = '$' THEN '^\s*["\[{tfn0-9-]' ELSE '^\s*[\[{]' END)
      THEN CAST(CAST(bq.refuse('a STRING that is not quite JSON is') AS VARCHAR) AS JSON) END;

CREATE OR REPLACE MACRO bq.text_json(v, path) AS CASE
    WHEN NOT regexp_matches(v, '[0-9][.eE]|-0') THEN bq.json_or_null(v, path)
    WHEN bq.json_or_null(v, path) IS NOT NULL THEN CAST(bq.json_marked(v, '') AS JSON) END;

CREATE OR REPLACE MACRO bq.marked_json(v, path) AS CASE
    WHEN bq.json_or_null(v, path) IS NULL THEN NULL
    WHEN NOT regexp_matches(v, '[0-9][.eE]|-0') THEN CAST(v AS JSON)
    WHEN contains(lower(v), '\u0001') THEN CAST(CAST(bq.refuse('JSON with U+0001 is') AS VARCHAR) AS JSON)
    ELSE CAST(bq.json_marked(v, '\u0001') AS JSON) END;

CREATE OR REPLACE MACRO bq.json_unmarked(v) AS regexp_replace(v, '"\\u0001([^"]*)"', '\1', 'g');

-- A number that FLOAT64 can't hold is an error in GoogleSQL.
CREATE OR REPLACE MACRO bq.is_exact_number(v) AS
    TRY_CAST(v AS HUGEINT) BETWEEN -9223372036854775808 AND 18446744073709551615 AND regexp_full_match(v, '-?[0-9]+')
      OR length(v) <= 16 AND NOT regexp_matches(v, '[eE][-+]?[0-9]{3}') OR bq.float_text(TRY_CAST(v AS DOUBLE)) = v;

CREATE OR REPLACE MACRO bq.parse_json(v) AS CASE
    WHEN bq.is_loose_json(v) OR TRY_CAST(v AS JSON) IS NULL AND v IS NOT NULL THEN CAST(CAST(bq.fail('Invalid input to PARSE_JSON: syntax error') AS VARCHAR) AS JSON)
    WHEN len(list_filter(regexp_extract_all(bq.json_bare(v), '[-+.0-9eE]{17,}|[0-9][eE][-+]?[0-9]{3}[0-9]*'), lambda n: NOT bq.is_exact_number(n))) > 0
      THEN CAST(CAST(bq.refuse('JSON with numbers of so many digits is') AS VARCHAR) AS JSON)
    ELSE CAST(bq_json_canonical(v) AS JSON) END;

CREATE OR REPLACE MACRO bq.json_query_text(v, path) AS CASE
    WHEN json_type(bq.marked_json(v, path), path) <> 'NULL' THEN bq.json_unmarked(CAST(json_extract(bq.marked_json(v, path), path) AS VARCHAR)) END;

CREATE OR REPLACE MACRO bq.json_query_array(v, path) AS CASE
    WHEN json_type(v, path) = 'ARRAY' THEN list_transform(CAST(json_extract(v, path) AS JSON[]), lambda e: coalesce(e, CAST('null' AS JSON))) END;

CREATE OR REPLACE MACRO bq.json_query_array_text(v, path) AS
    list_transform(bq.json_query_array(bq.marked_json(v, path), path), lambda e: bq.json_unmarked(CAST(e AS VARCHAR)));

CREATE OR REPLACE MACRO bq.json_value_array(v, path) AS CASE
    WHEN len(list_filter(bq.json_query_array(v, path), lambda e: json_type(e) IN ('ARRAY', 'OBJECT'))) = 0
      THEN list_transform(bq.json_query_array(v, path), lambda e: json_extract_string(e, '$')) END;

CREATE OR REPLACE MACRO bq.json_value_array_text(v, path) AS bq.json_value_array(bq.text_json(v, path), path);

CREATE OR REPLACE MACRO bq.json_type_name(v) AS CASE json_type(v)
    WHEN 'OBJECT' THEN 'object' WHEN 'ARRAY' THEN 'array' WHEN 'VARCHAR' THEN 'string' WHEN 'BOOLEAN' THEN 'boolean'
    WHEN 'NULL' THEN 'null' ELSE CASE WHEN v IS NOT NULL THEN 'number' END END;

CREATE OR REPLACE MACRO bq.json_bool(v) AS CASE
    WHEN json_type(v) = 'BOOLEAN' THEN CAST(v AS BOOLEAN)
    WHEN v IS NOT NULL THEN CAST(bq.fail('The provided JSON input is not a boolean') AS BOOLEAN) END;

CREATE OR REPLACE MACRO bq.json_int64(v) AS CASE
    WHEN json_type(v) IN ('BIGINT', 'UBIGINT') AND TRY_CAST(CAST(v AS VARCHAR) AS BIGINT) IS NOT NULL THEN CAST(CAST(v AS VARCHAR) AS BIGINT)
    WHEN json_type(v) = 'DOUBLE' AND CAST(v AS DOUBLE) = trunc(CAST(v AS DOUBLE)) AND abs(CAST(v AS DOUBLE)) < 9007199254740992
      THEN CAST(CAST(v AS DOUBLE) AS BIGINT)
    WHEN v IS NOT NULL THEN CAST(bq.fail('The provided JSON input is not an integer') AS BIGINT) END;

CREATE OR REPLACE MACRO bq.json_float64(v) AS CASE
    WHEN json_type(v) = 'DOUBLE' THEN CAST(v AS DOUBLE)
    WHEN json_type(v) IN ('BIGINT', 'UBIGINT') AND abs(CAST(v AS DOUBLE)) <= 9007199254740992 THEN CAST(v AS DOUBLE)
    WHEN json_type(v) IN ('BIGINT', 'UBIGINT') THEN CAST(bq.refuse('FLOAT64 of a large JSON number is') AS DOUBLE)
    WHEN v IS NOT NULL THEN CAST(bq.fail('The provided JSON input is not a number') AS DOUBLE) END;

CREATE OR REPLACE MACRO bq.json_of_int64(v) AS
    CASE WHEN abs(CAST(v AS HUGEINT)) > 9007199254740992 THEN '"' || CAST(v AS VARCHAR) || '"' ELSE CAST(v AS VARCHAR) END;

CREATE OR REPLACE MACRO bq.json_of_numeric(v) AS CASE
    WHEN v = trunc(v) AND abs(v) <= 9007199254740992 THEN bq.numeric_text(v) ELSE '"' || bq.numeric_text(v) || '"' END;

CREATE OR REPLACE MACRO bq.json_of_float64(v) AS CASE
    WHEN isnan(v) THEN '"NaN"' WHEN isinf(v) THEN CASE WHEN v > 0 THEN '"Infinity"' ELSE '"-Infinity"' END
    WHEN v = 0 THEN '0' ELSE bq.float_text(v) END;

CREATE OR REPLACE MACRO bq.json_of_text(v) AS
    replace(replace(CAST(to_json(CAST(v AS VARCHAR)) AS VARCHAR), chr(8232), '\u2028'), chr(8233), '\u2029');

CREATE OR REPLACE MACRO bq.json_of_name(v) AS CASE WHEN v IS NULL
    THEN CAST(bq.fail('Invalid input to JSON_OBJECT: A key cannot be NULL') AS VARCHAR) ELSE bq.json_of_text(v) END;

CREATE OR REPLACE MACRO bq.json_float64_value(v) AS CASE
    WHEN isnan(v) THEN '"NaN"' WHEN isinf(v) THEN CASE WHEN v > 0 THEN '"Infinity"' ELSE '"-Infinity"' END ELSE bq.float_shown(v) END;

CREATE OR REPLACE MACRO bq.json_numeric_value(v) AS CASE WHEN v = trunc(v) AND v BETWEEN -9223372036854775808 AND 18446744073709551615
    THEN bq.numeric_text(v) ELSE bq.float_shown(CAST(v AS DOUBLE)) END;

CREATE OR REPLACE MACRO bq.is_decimal_text(v) AS regexp_full_match(v, '[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?');

CREATE OR REPLACE MACRO bq.json_lax_bool(v) AS CASE
    WHEN json_type(v) = 'BOOLEAN' THEN CAST(v AS BOOLEAN)
    WHEN json_type(v) IN ('BIGINT', 'UBIGINT', 'DOUBLE') THEN TRY_CAST(v AS DOUBLE) <> 0
    WHEN json_type(v) = 'VARCHAR' THEN CASE lower(json_extract_string(v, '$')) WHEN 'true' THEN true WHEN 'false' THEN false END END;

CREATE OR REPLACE MACRO bq.json_lax_string(v) AS CASE
    WHEN json_type(v) IN ('VARCHAR', 'BOOLEAN', 'BIGINT', 'UBIGINT') THEN json_extract_string(v, '$')
    WHEN json_type(v) = 'DOUBLE' THEN CASE WHEN TRY_CAST(v AS DOUBLE) = 0 THEN '0' ELSE bq.float_text(TRY_CAST(v AS DOUBLE)) END END;

-- A text may be surrounded by spaces, and up to 18 digits after the point are significant.
CREATE OR REPLACE MACRO bq.text_lax_int64(v) AS
    CASE WHEN bq.is_decimal_text(v) THEN TRY_CAST(round(TRY_CAST(v AS DECIMAL(38,18))) AS BIGINT) END;

CREATE OR REPLACE MACRO bq.json_lax_int64(v) AS CASE
    WHEN json_type(v) = 'BOOLEAN' THEN CAST(CAST(v AS BOOLEAN) AS BIGINT)
    WHEN json_type(v) IN ('BIGINT', 'UBIGINT') THEN TRY_CAST(CAST(v AS VARCHAR) AS BIGINT)
    WHEN json_type(v) = 'DOUBLE' THEN TRY_CAST(round(TRY_CAST(v AS DOUBLE)) AS BIGINT)
    WHEN json_type(v) = 'VARCHAR' THEN bq.text_lax_int64(trim(json_extract_string(v, '$'), E' \t\n\r\f\v')) END;

CREATE OR REPLACE MACRO bq.text_lax_float64(v) AS CASE
    WHEN bq.is_decimal_text(v) AND isfinite(TRY_CAST(v AS DOUBLE)) THEN TRY_CAST(v AS DOUBLE)
    WHEN regexp_matches(v, '^[-+]?0[xX]') OR bq.is_decimal_text(v)
      THEN CAST(bq.refuse('LAX_FLOAT64 of this text is') AS DOUBLE)
    WHEN regexp_full_match(v, '(?i)[-+]?inf(?:inity)?') THEN CASE WHEN v[1] = '-' THEN CAST('-inf' AS DOUBLE) ELSE CAST('inf' AS DOUBLE) END
    WHEN lower(v) = 'nan' THEN CAST('NaN' AS DOUBLE) END;

CREATE OR REPLACE MACRO bq.json_lax_float64(v) AS CASE
    WHEN json_type(v) IN ('BIGINT', 'UBIGINT', 'DOUBLE') THEN TRY_CAST(v AS DOUBLE)
    WHEN json_type(v) = 'VARCHAR' THEN bq.text_lax_float64(trim(json_extract_string(v, '$'), E' \t\n\r\f\v')) END;
